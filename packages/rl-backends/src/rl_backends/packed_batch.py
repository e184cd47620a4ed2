"""A batch as numpy arrays, whose memory the processes of a node can share, as Ray does; tensors would be copied."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch as numpy arrays."""

    kind: type[Any]
    """The dataclass of the batch."""
    arrays: Mapping[str, Any]
    """Its tensors."""
    dtypes: Mapping[str, torch.dtype]
    """Of the tensors."""
    others: Mapping[str, Any]
    """Its other fields; a batch among them is packed too."""


def pack(examples: Any) -> PackedBatch:
    """Pack a dataclass with tensors."""
    values = {field.name: getattr(examples, field.name) for field in fields(examples) if field.init}
    tensors = {name: value.detach().cpu().contiguous() for name, value in values.items() if isinstance(value, Tensor)}
    return PackedBatch(
        kind=type(examples),
        # numpy has no bfloat16; the same bits travel as int16.
        arrays={
            name: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        },
        dtypes={name: tensor.dtype for name, tensor in tensors.items()},
        others={
            name: pack(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in values.items()
            if name not in tensors
        },
    )


def unpack(packed: PackedBatch) -> Any:
    """The batch again; its tensors lie in the memory of the arrays, which is read-only."""
    with warnings.catch_warnings():
        # Nobody writes to them: a backend indexes the rows that it works on, and so copies them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {name: torch.from_numpy(array).view(packed.dtypes[name]) for name, array in packed.arrays.items()}
    others = {name: unpack(each) if isinstance(each, PackedBatch) else each for name, each in packed.others.items()}
    return packed.kind(**tensors, **others)
