"""The memory of an engine's module: which tensor lies where, and which box a view is.

Parameters come first, then buffers, persistent or not; each memory once; DTensors appear as their local tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_refit.layout import Region, local_part

__all__ = ["EngineMemory", "LoadWeights", "Place", "read_memory", "storage_id"]

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's own loader: takes pairs of a Hugging Face name and a tensor."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What a module holds."""

    tensors: dict[str, Tensor]
    """Detached, in the module's own memory; of names that share one, the first."""

    tied: dict[str, str]
    """The other names of the same memory, each with the first."""


def read_memory(module: nn.Module) -> EngineMemory:
    """Every parameter and every buffer of `module` as it is now."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        local = local_part(tensor)
        root = first.setdefault((storage_id(local), Place.of(local)), name) if local.numel() else name
        if root == name:
            tensors[name] = local
        else:
            tied[name] = root
    return EngineMemory(tensors, tied)


def storage_id(tensor: Tensor) -> int:
    """The same for tensors of one storage, for as long as it lives; `data_ptr` is 0 for all on the meta device."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001  as torch's own code tells storages apart
    return address


@dataclass(frozen=True, slots=True)
class Place:
    """A view of a storage, in elements of `dtype`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Where `tensor` lies in its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def bytes(self) -> range:
        """From its first byte in the storage to its last."""
        last = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return range(self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize)

    def dims_in(self, whole: Place) -> tuple[int | None, ...] | None:
        """For each dim the dim of `whole` that it runs along, None for one of one element; None if there is none."""
        free = [dim for dim, size in enumerate(whole.shape) if size > 1 and whole.strides[dim] > 0]
        dims: list[int | None] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            dim = next((dim for dim in free if whole.strides[dim] == stride), None) if size != 1 else None
            if size != 1 and dim is None:
                return None
            free = [other for other in free if other != dim]
            dims.append(dim)
        return tuple(dims)

    def box_in(self, whole: Place, name: str = "") -> Region | None:
        """The box that it covers in the tensor `name`, stored at `whole`; None if it is no box of that."""
        dims = self.dims_in(whole)
        if dims is None:
            return None
        starts, sizes, offset = [0] * len(whole.shape), [1] * len(whole.shape), self.offset - whole.offset
        for dim, size in zip(dims, self.shape, strict=True):
            if dim is not None:
                sizes[dim] = size
        for dim in sorted(range(len(starts)), key=lambda dim: -whole.strides[dim]):
            if whole.shape[dim] > 1 and whole.strides[dim] > 0:
                starts[dim], offset = divmod(offset, whole.strides[dim])
        inside = all(a >= 0 and a + n <= m for a, n, m in zip(starts, sizes, whole.shape, strict=True))
        return Region(name, tuple(starts), tuple(sizes)) if inside and offset == 0 else None
