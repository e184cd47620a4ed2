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
class PackedTensor:
    """A tensor as a numpy array."""

    array: Any
    dtype: torch.dtype
    """Of the tensor."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A batch as numpy arrays."""

    kind: type[Any]
    """The dataclass of the batch."""
    fields: Mapping[str, Any]
    """Its fields, each as `pack` makes it."""


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


def pack(value: Any) -> Any:
    """Pack a tensor, or a dataclass with whatever its fields hold; anything else stays what it is."""
    if isinstance(value, Tensor):
        return pack_tensor(value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: pack(getattr(value, field.name)) for field in fields(value) if field.init}
        return PackedBatch(type(value), own)
    return value


def unpack(packed: Any) -> Any:
    """The inverse of `pack`; tensors lie in the memory of the arrays, which is read-only.

    Nobody writes to them: a backend indexes the rows that it works on, and so copies them.
    """
    if isinstance(packed, PackedTensor):
        return unpack_tensor(packed)
    if isinstance(packed, PackedBatch):
        return packed.kind(**{name: unpack(value) for name, value in packed.fields.items()})
    return packed
