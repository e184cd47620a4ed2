"""What a loader writes where, found by letting it run once on the meta device.

Knows torch alone: no vLLM, no values. Every operation of the loader is seen below autograd. One that writes is noted
with the names of the source tensors whose values it reads, or what was made of them; a plain copy also with the place
it copies from. So the loader's code need not be understood, and what counts is its real arithmetic of shards, fused
weights and padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_refit.layout import Region

__all__ = ["Place", "Write", "WriteLog", "box_within", "storage_of", "without"]


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
        return cls(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Write:
    """One operation that wrote to `target`."""

    target: Place

    names: tuple[str, ...]
    """The source tensors that it reads; none for padding."""

    origin: Place | None
    """Where it copied from, in the one source tensor of `names`; None for anything but a plain copy."""


class WriteLog(TorchDispatchMode):
    """While entered, notes every write, by storage.

    Attributes:
        writes: Storage → the writes to it, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: dict[int, list[Write]] = {}
        self._names: dict[int, frozenset[str]] = {}
        self._sources: set[int] = set()
        self._alive: list[Tensor] = []  # a storage's address tells it apart only as long as it is not freed

    @property
    def used(self) -> set[str]:
        """The source tensors of which anything was written."""
        return {name for writes in self.writes.values() for write in writes for name in write.names}

    def watch(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The source tensors, whole and contiguous, with their names: what the loader is to be given."""
        for name, tensor in weights.items():
            self._names[storage_of(tensor)] = frozenset({name})
            self._sources.add(storage_of(tensor))
            self._alive.append(tensor)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note what it wrote or made."""
        result = func(*args, **(kwargs or {}))
        targets = [
            target
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for target in _tensors(value)
        ]
        read = [tensor for tensor in _tensors([args, kwargs or {}]) if all(tensor is not target for target in targets)]
        names = frozenset(itertools.chain.from_iterable(self._names.get(storage_of(tensor), ()) for tensor in read))
        for target in targets:
            self._note(target, names, read[0] if func is torch.ops.aten.copy_.default else None)
        for tensor in _tensors(result) if names else ():
            self._names.setdefault(storage_of(tensor), names)
            self._alive.append(tensor)
        return result

    def _note(self, target: Tensor, names: frozenset[str], copied: Tensor | None) -> None:
        plain = copied is not None and copied.shape == target.shape and storage_of(copied) in self._sources
        origin = Place.of(copied) if copied is not None and plain else None
        self.writes.setdefault(storage_of(target), []).append(Write(Place.of(target), tuple(sorted(names)), origin))
        self._alive.append(target)


def storage_of(tensor: Tensor) -> int:
    """Tells storages apart, also those without memory, as long as they live."""
    return int(tensor.untyped_storage()._cdata)


def box_within(place: Place, whole: Place) -> Region | None:
    """The box of a tensor that lies at `whole` in its storage which `place` is; None where it is no box of it."""
    offset = place.offset - whole.offset
    if place.numel == whole.numel and offset == 0 and _is_dense(place) and _is_dense(whole):
        return Region("", (0,) * len(whole.shape), whole.shape)
    starts, sizes = [0] * len(whole.shape), [1] * len(whole.shape)
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
    inside = all(0 <= a and a + n <= m for a, n, m in zip(starts, sizes, whole.shape, strict=True))
    return Region("", tuple(starts), tuple(sizes)) if inside and offset == 0 else None


def without(whole: tuple[int, ...], boxes: Iterable[Region]) -> list[Region]:
    """What is left of a tensor of shape `whole` when all `boxes` are taken away."""
    left = [Region("", (0,) * len(whole), whole)]
    for box in boxes:
        left = list(itertools.chain.from_iterable(part.minus(box) for part in left))
    return left


def _is_dense(place: Place) -> bool:
    """Whether it is contiguous, in row-major order."""
    expected = 1
    for size, stride in zip(reversed(place.shape), reversed(place.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)
