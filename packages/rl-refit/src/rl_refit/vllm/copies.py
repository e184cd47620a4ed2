"""Which plain copies a loader makes of its source tensors, and into what else their values go.

Knows torch alone. Beside `rl_refit.tracing`, which says what is written at all: here is where a source tensor lies
afterwards, what is written without a source, and whether two of them are written to the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_refit.layout import Region

__all__ = ["Copies", "Place", "Write", "box_within", "storage_of", "strides_by_dim"]

_FILLS = {torch.ops.aten.fill_, torch.ops.aten.zero_}


@dataclass(frozen=True, slots=True)
class Place:
    """A view of a storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Where `tensor` lies in its storage."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Write:
    """One operation that wrote to `target`."""

    target: Place

    names: tuple[str, ...]
    """The source tensors of whose values, or what was made of them, it reads; none for padding."""

    origin: Place | None
    """Where it copied from, in the one source tensor of `names`; None for anything but a plain copy."""

    fills: bool = False
    """Whether it overwrites with a constant."""


class Copies(TorchDispatchMode):
    """While entered, notes every write, by storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes: dict[int, list[Write]] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._sources: set[int] = set()
        self._alive: list[Tensor] = []  # a storage's address tells it apart only as long as it is not freed

    def to(self, tensor: Tensor) -> list[Write]:
        """The writes to the storage of `tensor`, in order."""
        return self._writes.get(storage_of(tensor), [])

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The source tensors, whole and contiguous, with their names: what the loader is to be given."""
        for name, tensor in weights:
            self._names[storage_of(tensor)] = frozenset({name})
            self._sources.add(storage_of(tensor))
            self._alive.append(tensor)
            yield name, tensor

    def __torch_dispatch__(  # noqa: PLR0917  (torch's signature)
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation, and note what it wrote or made."""
        result = func(*args, **(kwargs or {}))
        arguments = zip(func._schema.arguments, args, strict=False)  # noqa: SLF001  (the only place that says it)
        written = [value for argument, value in arguments if argument.alias_info and argument.alias_info.is_write]
        targets = _tensors(written)
        read = [tensor for tensor in _tensors((args, kwargs)) if all(tensor is not target for target in targets)]
        names = frozenset[str]().union(*(self._names.get(storage_of(tensor), ()) for tensor in read))
        for target in targets:
            copied = read[0] if func is torch.ops.aten.copy_.default and read else None
            self._note(target, names, copied, fills=func.overloadpacket in _FILLS)
        for tensor in _tensors(result) if names else ():
            self._names.setdefault(storage_of(tensor), names)
            self._alive.append(tensor)
        return result

    def _note(self, target: Tensor, names: frozenset[str], copied: Tensor | None, *, fills: bool) -> None:
        plain = copied is not None and copied.shape == target.shape and storage_of(copied) in self._sources
        origin = Place.of(copied) if copied is not None and plain else None
        write = Write(Place.of(target), tuple(sorted(names)), origin, fills)
        self._writes.setdefault(storage_of(target), []).append(write)
        self._alive.append(target)


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart, also those without memory, as long as they live."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  (meta storages have no address of data)


def strides_by_dim(origin: Place, whole: Place, target: Place) -> tuple[int, ...]:
    """The strides of `target` in the order of the dims of `whole`, where `origin`, a box of that, is copied to it.

    Where the box has one element along a dim, the stride is 0.
    """
    strides, free = [0] * len(whole.shape), [dim for dim, size in enumerate(whole.shape) if size > 1]
    for size, stride, into in zip(origin.shape, origin.strides, target.strides, strict=True):
        if size != 1:
            dim = next(dim for dim in free if whole.strides[dim] == stride)
            free.remove(dim)
            strides[dim] = into
    return tuple(strides)


def box_within(place: Place, whole: Place) -> Region | None:
    """The box that `place` covers in the tensor stored at `whole`, or None if `place` is not a box of it."""
    starts, sizes, offset = [0] * len(whole.shape), [1] * len(whole.shape), place.offset - whole.offset
    free = [dim for dim, size in enumerate(whole.shape) if size > 1]
    for size, stride in zip(place.shape, place.strides, strict=True):
        if size != 1:
            dim = next((dim for dim in free if whole.strides[dim] == stride), None)
            if dim is None:
                return None
            free.remove(dim)
            sizes[dim] = size
    for dim in sorted(range(len(starts)), key=lambda dim: -whole.strides[dim]):
        if whole.shape[dim] > 1:
            starts[dim], offset = divmod(offset, whole.strides[dim])
    inside = all(a >= 0 and a + n <= m for a, n, m in zip(starts, sizes, whole.shape, strict=True))
    return Region("", tuple(starts), tuple(sizes)) if inside and offset == 0 else None


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
