"""A batch on its way to the ranks: written once, and read in place by every rank of a node. Knows no loss.

Ray shares the memory of arrays between the processes of a node, and of arrays alone. They cannot be written to, which
nobody does: a backend indexes the rows that it works on, and so copies them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedExamples", "pack", "unpack"]

_NO_ARRAYS = {torch.bfloat16: torch.int16}  # numpy has no such numbers, and the same bits will do


@dataclass(frozen=True, slots=True)
class PackedExamples:
    """Examples as arrays."""

    kind: type[Any]
    """The dataclass that they are."""

    arrays: Mapping[str, Any]
    """Its tensors."""

    dtypes: Mapping[str, torch.dtype]
    """Of these."""

    others: Mapping[str, Any]
    """Its other fields."""


def pack(examples: Any) -> PackedExamples:
    """Of a dataclass with tensors."""
    values = {field.name: getattr(examples, field.name) for field in fields(examples) if field.init}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return PackedExamples(
        kind=type(examples),
        arrays={name: _as_array(tensor) for name, tensor in tensors.items()},
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        others={name: value for name, value in values.items() if name not in tensors},
    )


def unpack(packed: PackedExamples) -> Any:
    """The examples again, their tensors in the memory of the arrays."""
    with warnings.catch_warnings():
        # torch has no tensors that cannot be written to, and warns of them; see above.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {name: torch.from_numpy(array).view(packed.dtypes[name]) for name, array in packed.arrays.items()}
    return packed.kind(**tensors, **packed.others)


def _as_array(tensor: Tensor) -> Any:
    there = tensor.detach().cpu().contiguous()
    return there.view(_NO_ARRAYS.get(there.dtype, there.dtype)).numpy()
