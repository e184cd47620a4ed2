"""Boxes of a tensor that lies flattened in memory, in whole or in part.

An optimizer that is shared out to data-parallel ranks keeps a range of each flattened parameter, which begins and ends
in the midst of a row. Knows shapes and numbers; does not know who cut the range.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from rl_parallel_plans import Box

__all__ = ["FlatBox", "flat_boxes"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBox:
    """A contiguous part of a whole tensor, and where it begins in this rank's flat memory."""

    offsets: tuple[int, ...]
    """Of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    """Its shape."""
    start: int
    """Of its first element in the flat tensor."""

    def of_local(self, local: Tensor) -> Tensor:
        """A view of the box in contiguous memory of whatever shape."""
        return local.view(-1)[self.start : self.start + math.prod(self.sizes)].view(self.sizes)


def flat_boxes(boxes: Iterable[Box], shape: Sequence[int], *, start: int, end: int) -> list[FlatBox]:
    """What a range of this rank's flattened tensor holds of each of its boxes.

    A matrix's range is at most a part of a row, whole rows and a part of a row: three boxes.

    Args:
        boxes: of the tensor; each lies in one piece in its memory.
        shape: of this rank's tensor.
        start: of the range in the flattened tensor; boxes begin counting there.
        end: behind its last element.
    """
    found: list[FlatBox] = []
    for box in boxes:
        first = _flat_start(box, shape)
        low, high = max(start - first, 0), min(end - first, math.prod(box.sizes))
        for at, inner, sizes in _cut(box.sizes, low, high):
            offsets = tuple(outer + offset for outer, offset in zip(box.offsets, inner, strict=True))
            found.append(FlatBox(offsets=offsets, sizes=sizes, start=first + at - start))
    return found


def _flat_start(box: Box, shape: Sequence[int]) -> int:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, size in enumerate(box.sizes) if size != 1]
    assert not cut or box.sizes[cut[0] + 1 :] == tuple(shape[cut[0] + 1 :]), (box, shape)
    return sum(offset * stride for offset, stride in zip(box.local_offsets, strides, strict=True))


def _cut(sizes: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The boxes that [low, high) of a flattened tensor of these sizes consists of: where, offsets, sizes."""
    if low >= high:
        return
    if not sizes:
        yield 0, (), ()
        return
    row = math.prod(sizes[1:])
    first, last = -(-low // row), high // row  # whole rows
    if first > last:  # it begins and ends in one row
        yield from _cut_row(sizes, last, low=low, high=high)
        return
    yield from _cut_row(sizes, first - 1, low=low, high=first * row)
    if first < last:
        yield first * row, (first, *(0 for _ in sizes[1:])), (last - first, *sizes[1:])
    yield from _cut_row(sizes, last, low=last * row, high=high)


def _cut_row(
    sizes: tuple[int, ...], row: int, *, low: int, high: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(sizes[1:])
    for at, offsets, inner in _cut(sizes[1:], low - begin, high - begin):
        yield begin + at, (row, *offsets), (1, *inner)
