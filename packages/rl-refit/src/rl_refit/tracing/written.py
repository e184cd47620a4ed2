"""Which elements of a tensor were written, from the strided views that were.

A view is turned into boxes of the tensor where its strides allow, which costs the same for any size; otherwise, and
where a tensor of indices said where to write, elements are marked one by one, in a byte each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rl_refit.layout import Region
from rl_refit.tracing.element_map import find_regions
from rl_refit.tracing.strided import Loop, pieces_of_loops

__all__ = ["Write", "unwritten"]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A view of a storage that was written; offset and strides count elements of `itemsize` bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    mask: Tensor | None = None
    """Where in the view; all of it where None."""

    @classmethod
    def of(cls, tensor: Tensor, mask: Tensor | None = None) -> Write:
        """The write of a whole tensor, or of its elements where `mask` is True."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.element_size(), mask)

    @property
    def stop(self) -> int:
        """Behind the last element."""
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


def unwritten(name: str, tensor: Tensor, writes: Sequence[Write]) -> tuple[Region, ...]:
    """The boxes of `tensor`, called `name`, that none of `writes` into its storage reaches."""
    whole = Region(name, (0,) * tensor.dim(), tuple(tensor.shape))
    mine = [write for write in writes if 0 not in write.shape and _touches(tensor, write)]
    if not mine:
        return (whole,)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], -tensor.shape[dim]))
    if not tensor.permute(order).is_contiguous() or not all(_is_inside(tensor, write) for write in mine):
        return _unmarked(name, tensor, mine)
    left = [whole]
    for write in mine:
        for box in _boxes(tensor, write, order):
            left = [rest for region in left for rest in region.minus(replace(box, name=name))]
        if not left:
            break
    return tuple(left)


def _touches(tensor: Tensor, write: Write) -> bool:
    own = Write.of(tensor)
    starts, stops = own.offset * own.itemsize, own.stop * own.itemsize
    return write.offset * write.itemsize < stops and starts < write.stop * write.itemsize


def _is_inside(tensor: Tensor, write: Write) -> bool:
    own = Write.of(tensor)
    fits = own.offset <= write.offset and write.stop <= own.stop
    return fits and write.itemsize == own.itemsize and write.mask is None


def _boxes(tensor: Tensor, write: Write, order: Sequence[int]) -> Iterator[Region]:
    """The boxes of a view of `tensor`, whose dims in the order of memory are `order`."""
    shape = [tensor.shape[dim] for dim in order]
    loops = [Loop(count, step, 0) for count, step in zip(write.shape, write.strides, strict=True)]
    for piece in pieces_of_loops(shape, loops, start=write.offset - int(tensor.storage_offset())):
        box = sorted(zip(order, piece.offsets, piece.shape, strict=True))
        yield Region("", tuple(start for _, start, _ in box), tuple(size for _, _, size in box))


def _unmarked(name: str, tensor: Tensor, writes: Sequence[Write]) -> tuple[Region, ...]:
    own = Write.of(tensor)
    unit = min(write.itemsize for write in (own, *writes))
    marks = torch.zeros(tensor.untyped_storage().nbytes() // unit, dtype=torch.bool)
    for write in writes:
        place = _in_units(marks, write, unit)
        if write.mask is None:
            place.fill_(True)
        else:
            place |= write.mask[..., None]
    return find_regions(name, ~_in_units(marks, own, unit).all(-1))


def _in_units(marks: Tensor, write: Write, unit: int) -> Tensor:
    """The view's elements, and in a last dim their units."""
    units = write.itemsize // unit
    return marks.as_strided(
        (*write.shape, units), (*(stride * units for stride in write.strides), 1), write.offset * units
    )
