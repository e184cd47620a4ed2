"""Batches and results as numpy arrays, whose memory the processes of a node can share, as Ray does.

Tensors would be copied, and each takes torch a fifth of a millisecond to read.
"""

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


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as a numpy array."""

    array: Any
    dtype: torch.dtype
    """Of the tensor."""


def pack_tensor(tensor: Tensor) -> PackedTensor:
    """Pack a tensor of any device; on the CPU without a copy, where it is contiguous."""
    there = tensor.detach().cpu().contiguous()
    # numpy has no bfloat16; the same bits travel as int16.
    array = (there.view(torch.int16) if there.dtype == torch.bfloat16 else there).numpy()
    return PackedTensor(array, tensor.dtype)


def unpack_tensor(packed: PackedTensor) -> Tensor:
    """The tensor again, in the memory of the array, which may be read-only: whoever writes to it clones it first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(packed.array).view(packed.dtype)


def pack(examples: Any) -> PackedBatch:
    """Pack a dataclass with tensors."""
    values = {field.name: getattr(examples, field.name) for field in fields(examples) if field.init}
    tensors = {name: pack_tensor(value) for name, value in values.items() if isinstance(value, Tensor)}
    return PackedBatch(
        kind=type(examples),
        arrays={name: packed.array for name, packed in tensors.items()},
        dtypes={name: packed.dtype for name, packed in tensors.items()},
        others={
            name: pack(value) if is_dataclass(value) and not isinstance(value, type) else value
            for name, value in values.items()
            if name not in tensors
        },
    )


def unpack(packed: PackedBatch) -> Any:
    """The batch again; its tensors lie in the memory of the arrays, which is read-only."""
    # Nobody writes to them: a backend indexes the rows that it works on, and so copies them.
    tensors = {name: unpack_tensor(PackedTensor(array, packed.dtypes[name])) for name, array in packed.arrays.items()}
    others = {name: unpack(each) if isinstance(each, PackedBatch) else each for name, each in packed.others.items()}
    return packed.kind(**tensors, **others)
