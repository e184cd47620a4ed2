"""Tensors in files, and what stacking, joining, cutting and transposing makes of them; not read until asked.

A conversion that transformers runs on tensors (`torch.stack`, `torch.cat`, ...) runs on these as well, and gives
another one. `read_into` then copies any box of the result straight from the files. Where a conversion needs the
numbers, or another view of them, it is refused by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["LazyTensor", "UnknownConversionError"]


class UnknownConversionError(TypeError):
    """A function of torch that is not done on slices of files; the message is its name."""


class LazyTensor(ABC):
    """A tensor whose numbers lie in files."""

    def __init__(self, shape: Iterable[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype

    @abstractmethod
    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        """Copy the box of the shape of `out` that begins at `offsets` into `out`, cast to its dtype."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch's functions do to tensors, where it is known."""
        if (known := _FUNCTIONS.get(function)) is None:
            raise UnknownConversionError(getattr(function, "__name__", str(function)))
        return known(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Refuse by name what a tensor can do and this cannot."""
        raise UnknownConversionError(name) if hasattr(Tensor, name) else AttributeError(name)

    @property
    def ndim(self) -> int:
        """How many dims."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Of one dim."""
        return self.shape[dim]

    def contiguous(self) -> "LazyTensor":
        """Itself: it has no memory that could be laid out."""
        return self

    def squeeze(self, dim: int | None = None) -> "LazyTensor":
        """Without `dim`, or without every dim, where the size is 1."""
        squeezed = self
        for each in range(self.ndim - 1, -1, -1) if dim is None else [dim % self.ndim]:
            if self.shape[each] == 1:
                squeezed = _Squeezed(squeezed, each)
        return squeezed


class _Stacked(LazyTensor):
    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        _same([part.shape for part in parts])
        first = parts[0].shape
        self._parts, self._dim = tuple(parts), dim % (len(first) + 1)
        super().__init__((*first[: self._dim], len(parts), *first[self._dim :]), parts[0].dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        rest = [offset for dim, offset in enumerate(offsets) if dim != self._dim]
        for index, piece in enumerate(out.unbind(self._dim), start=offsets[self._dim]):
            self._parts[index].read_into(piece, rest)


class _Joined(LazyTensor):
    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        self._parts, self._dim = tuple(parts), dim % parts[0].ndim
        _same([[size for dim, size in enumerate(part.shape) if dim != self._dim] for part in parts])
        shape = list(parts[0].shape)
        shape[self._dim] = sum(part.shape[self._dim] for part in parts)
        super().__init__(shape, parts[0].dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        wanted, end = offsets[self._dim], offsets[self._dim] + out.shape[self._dim]
        start = 0
        for part in self._parts:
            stop = start + part.shape[self._dim]
            first, last = max(wanted, start), min(end, stop)
            if first < last:
                piece = out.narrow(self._dim, first - wanted, last - first)
                part.read_into(piece, [*offsets[: self._dim], first - start, *offsets[self._dim + 1 :]])
            start = stop


class _Cut(LazyTensor):
    def __init__(self, whole: LazyTensor, *, dim: int, start: int, size: int) -> None:
        self._whole, self._dim, self._start = whole, dim, start
        super().__init__((*whole.shape[:dim], size, *whole.shape[dim + 1 :]), whole.dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        at = self._dim
        self._whole.read_into(out, [*offsets[:at], offsets[at] + self._start, *offsets[at + 1 :]])


class _Transposed(LazyTensor):
    def __init__(self, other: LazyTensor, *, dim0: int, dim1: int) -> None:
        self._other, self._dims = other, (dim0 % other.ndim, dim1 % other.ndim)
        super().__init__(self._swapped(other.shape), other.dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        self._other.read_into(out.transpose(*self._dims), self._swapped(offsets))

    def _swapped(self, sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        dim0, dim1 = self._dims
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return swapped


class _Squeezed(LazyTensor):
    def __init__(self, other: LazyTensor, dim: int) -> None:
        self._other, self._dim = other, dim
        super().__init__((*other.shape[:dim], *other.shape[dim + 1 :]), other.dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        self._other.read_into(out.unsqueeze(self._dim), [*offsets[: self._dim], 0, *offsets[self._dim :]])


def _stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _Stacked(parts, dim)


def _cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _Joined(parts, dim)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    return _Transposed(tensor, dim0=dim0, dim1=dim1)


def _chunk(tensor: LazyTensor, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    whole = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"{list(sizes)} do not add up to the {whole} of dim {dim}")
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    dim %= tensor.ndim
    return tuple(_Cut(tensor, dim=dim, start=start, size=size) for start, size in zip(starts, sizes, strict=True))


def _same(shapes: Sequence[Sequence[int]]) -> None:
    if different := [list(shape) for shape in shapes if list(shape) != list(shapes[0])]:
        raise ValueError(f"shapes that do not fit together: {list(shapes[0])} and {different[0]}")


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
    torch.split: _split,
}
