"""Tensors in safetensors files, read when asked, and what stacking, splitting and transposing make of them.

The conversions that transformers runs on tensors (`torch.stack`, `torch.cat`, ...) run on a `LazyTensor` too, and
return another one. `read_into` then copies any box of the result straight from the files. A conversion that needs the
elements, or another view of them, is refused by its name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
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


class LazyTensor:
    """A tensor whose numbers lie in files.

    Args:
        shape: of it.
        dtype: in the files.
        read_into: `read_into(out, offsets)` copies the box of the shape of `out` that begins at `offsets` into `out`, cast
            to its dtype.
    """

    def __init__(
        self, shape: Iterable[int], dtype: torch.dtype, read_into: Callable[[Tensor, Sequence[int]], None]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.read_into = read_into

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
                squeezed = _without(squeezed, each)
        return squeezed


def _without(tensor: LazyTensor, dim: int) -> LazyTensor:
    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        tensor.read_into(out.unsqueeze(dim), [*offsets[:dim], 0, *offsets[dim:]])

    return LazyTensor((*tensor.shape[:dim], *tensor.shape[dim + 1 :]), tensor.dtype, read_into)


def _stack(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = parts[0].shape
    _same([part.shape for part in parts])
    dim %= len(first) + 1

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        for index, piece in enumerate(out.unbind(dim), start=offsets[dim]):
            parts[index].read_into(piece, [*offsets[:dim], *offsets[dim + 1 :]])

    return LazyTensor((*first[:dim], len(parts), *first[dim:]), parts[0].dtype, read_into)


def _cat(parts: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = parts[0].shape
    dim %= len(first)
    _same([[*part.shape[:dim], *part.shape[dim + 1 :]] for part in parts])
    starts = [0, *accumulate(part.shape[dim] for part in parts)]

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        wanted, end = offsets[dim], offsets[dim] + out.shape[dim]
        for part, start, stop in zip(parts, starts, starts[1:], strict=False):
            low, high = max(wanted, start), min(end, stop)
            if low < high:
                piece = out.narrow(dim, low - wanted, high - low)
                part.read_into(piece, [*offsets[:dim], low - start, *offsets[dim + 1 :]])

    return LazyTensor((*first[:dim], starts[-1], *first[dim + 1 :]), parts[0].dtype, read_into)


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    def swapped(sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return swapped

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        tensor.read_into(out.transpose(dim0, dim1), swapped(offsets))

    return LazyTensor(swapped(tensor.shape), tensor.dtype, read_into)


def _split(tensor: LazyTensor, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
    whole = tensor.shape[dim]
    dim %= tensor.ndim
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    if sum(sizes) != whole:
        raise ValueError(f"{list(sizes)} do not add up to the {whole} of dim {dim}")

    def part(start: int, size: int) -> LazyTensor:
        def read_into(out: Tensor, offsets: Sequence[int]) -> None:
            tensor.read_into(out, [*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]])

        return LazyTensor((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), tensor.dtype, read_into)

    return tuple(part(sum(sizes[:at]), size) for at, size in enumerate(sizes))


def _same(shapes: Sequence[Sequence[int]]) -> None:
    if different := [list(shape) for shape in shapes if list(shape) != list(shapes[0])]:
        raise ValueError(f"shapes that do not fit together: {list(shapes[0])} and {different[0]}")


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.transpose: _transpose,
    torch.chunk: lambda tensor, chunks, dim=0: _split(tensor, -(-tensor.shape[dim] // chunks), dim),
    torch.split: _split,
}


# ---- Files.


def _file_tensor(handle: Any, name: str, *, file: Path) -> LazyTensor:
    """One tensor of an open safetensors file."""
    stored = handle.get_slice(name)
    if (dtype := DTYPES.get(stored.get_dtype())) is None:
        raise ModelError(
            f"{file}: {name} is stored as {stored.get_dtype()}; quantized weights cannot be trained, give the "
            f"folder of the model in bfloat16, float16 or float32"
        )

    def read_into(out: Tensor, offsets: Sequence[int]) -> None:
        if not offsets:
            out.copy_(handle.get_tensor(name))
            return
        # Some rows at a time, so that what is read and not yet cast stays small.
        row_bytes = max(1, out[:1].numel() * dtype.itemsize)
        rows = max(1, PIECE_BYTES // row_bytes)
        inner = tuple(slice(at, at + size) for at, size in zip(offsets[1:], out.shape[1:], strict=True))
        for first in range(0, out.shape[0], rows):
            piece = out[first : first + rows]
            piece.copy_(stored[(slice(offsets[0] + first, offsets[0] + first + piece.shape[0]), *inner)])

    return LazyTensor(stored.get_shape(), dtype, read_into)


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
            found |= {name: _file_tensor(handle, name, file=file) for name in handle.keys()}  # noqa: SIM118 - no mapping
        yield found
