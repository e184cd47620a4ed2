"""Tensors in safetensors files, read when asked, and what stacking, splitting and transposing make of them.

The conversions that transformers runs on tensors (`torch.stack`, `torch.cat`, ...) run on a `LazyTensor` too, and
return another one. `read_into` then copies any box of the result straight from the files. A conversion that needs the
elements, or another view of them, is refused by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.errors import ModelError

PIECE_BYTES = 32 * 2**20
"""Most bytes that are read at once, where a row of a tensor is not larger."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Under the names of safetensors. Floats of 8 bits and fewer are absent: their scales lie in other tensors."""


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
    def __init__(self, parts: Sequence[LazyTensor], dim: int = 0) -> None:
        _same([part.shape for part in parts])
        first = parts[0].shape
        self._parts, self._dim = tuple(parts), dim % (len(first) + 1)
        super().__init__((*first[: self._dim], len(parts), *first[self._dim :]), parts[0].dtype)

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        rest = [offset for dim, offset in enumerate(offsets) if dim != self._dim]
        for index, piece in enumerate(out.unbind(self._dim), start=offsets[self._dim]):
            self._parts[index].read_into(piece, rest)


class _Joined(LazyTensor):
    def __init__(self, parts: Sequence[LazyTensor], dim: int = 0) -> None:
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
    def __init__(self, other: LazyTensor, dim0: int, dim1: int) -> None:
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
    torch.stack: _Stacked,
    torch.cat: _Joined,
    torch.transpose: _Transposed,
    torch.chunk: lambda tensor, chunks, dim=0: _split(tensor, -(-tensor.shape[dim] // chunks), dim),
    torch.split: _split,
}


# ---- Files.


class FileTensor(LazyTensor):
    """One tensor of an open safetensors file."""

    def __init__(self, handle: Any, name: str, *, file: Path) -> None:
        header = handle.get_slice(name)
        if (dtype := DTYPES.get(header.get_dtype())) is None:
            raise ModelError(
                f"{file}: {name} is stored as {header.get_dtype()}; quantized weights cannot be trained, give the "
                f"folder of the model in bfloat16, float16 or float32"
            )
        super().__init__(header.get_shape(), dtype)
        self._handle, self._name = handle, name

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        """Copy a box, some rows at a time, so that what is read and not yet cast stays small."""
        if not offsets:
            out.copy_(self._handle.get_tensor(self._name))
            return
        row_bytes = max(1, out[:1].numel() * self.dtype.itemsize)
        rows = max(1, PIECE_BYTES // row_bytes)
        inner = tuple(slice(at, at + size) for at, size in zip(offsets[1:], out.shape[1:], strict=True))
        stored = self._handle.get_slice(self._name)
        for first in range(0, out.shape[0], rows):
            piece = out[first : first + rows]
            piece.copy_(stored[(slice(offsets[0] + first, offsets[0] + first + piece.shape[0]), *inner)])


@contextmanager
def open_tensors(files: Sequence[Path]) -> Iterator[dict[str, LazyTensor]]:
    """Every tensor of safetensors files under its name there, to be read until the end of the context."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, LazyTensor] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {type(error).__name__}: {error}; fetch it again") from error
            found |= {name: FileTensor(handle, name, file=file) for name in handle.keys()}  # noqa: SIM118 - no mapping
        yield found
