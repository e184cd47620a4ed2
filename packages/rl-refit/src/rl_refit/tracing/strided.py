"""Boxes of a tensor from strided loops over it, and back: the arithmetic of views, on plain integers.

A *loop* runs `count` times; each turn moves `step` elements on in the row-major order of a named tensor, and `stride`
elements on in memory. Nested loops are what any view made of slices, transpositions, `unfold`s and reshapes comes to. A
*piece* is a box of the named tensor of which every dim has one stride in memory.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Loop", "Piece", "join_pieces", "pieces_of_loops", "row_major"]


@dataclass(frozen=True, slots=True)
class Loop:
    """`count` turns, each `step` further in the named tensor and `stride` further in memory."""

    count: int
    step: int
    stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The box of `shape` at `offsets`, whose first element is at `memory` and dim d has `strides[d]` there."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    memory: int
    strides: tuple[int, ...]
    """1 for a dim of one element, where it says nothing."""

    @property
    def numel(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of each dim of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def pieces_of_loops(shape: Sequence[int], loops: Iterable[Loop], *, start: int = 0, memory: int = 0) -> Iterator[Piece]:
    """Cut what nested `loops` visit of a tensor of `shape`, from its element number `start` on, into pieces.

    A loop that runs along a dim, or across whole dims, stays one; what is no box (every third row, backwards, the same
    element twice) is unrolled into one piece a turn.
    """
    pending = sorted((loop for loop in loops if loop.count > 1), key=lambda loop: loop.step)
    axes = _Axes(tuple(shape), start)
    for index, loop in enumerate(pending):
        if axes.take(loop):
            continue
        others = pending[:index] + pending[index + 1 :]
        for turns in axes.cut(loop):
            inner = [*others, *_folded(turns)]
            first = turns.start
            yield from pieces_of_loops(
                shape, inner, start=start + first * loop.step, memory=memory + first * loop.stride
            )
        return
    yield Piece(tuple(axes.offsets), tuple(axes.extents), memory, tuple(axes.strides))


@dataclass(frozen=True, slots=True)
class _Turns:
    """Consecutive turns of a loop, from `start` on; `width` of them fill one row of the dim that it runs along."""

    loop: Loop
    start: int
    width: int


def _folded(turns: _Turns) -> list[Loop]:
    """The loop of those turns; where they fill several rows exactly, two loops: along a row, and over the rows."""
    loop, width = turns.loop, turns.width
    if not width or loop.count <= width:
        return [loop]
    return [
        replace(loop, count=width),
        Loop(loop.count // width, loop.step * width, loop.stride * width),
    ]


class _Axes:
    """How far the loops taken so far reach along each dim."""

    def __init__(self, shape: tuple[int, ...], start: int) -> None:
        self._shape = shape
        self._steps = row_major(shape)
        self.offsets = [start // step % size if size else 0 for step, size in zip(self._steps, shape, strict=True)]
        self.extents = [1] * len(shape)
        self.strides = [1] * len(shape)

    def take(self, loop: Loop) -> bool:
        """Extend a dim by the loop; False, and nothing done, where that makes no box."""
        dim = self._dim(loop)
        if dim is None:
            return False
        turn = loop.step // self._steps[dim]
        extent = self.extents[dim]
        continues = extent == 1 or loop.stride == extent * self.strides[dim]
        if turn != extent or not continues or self.offsets[dim] + loop.count * turn > self._shape[dim]:
            return False
        self.strides[dim] = loop.stride if extent == 1 else self.strides[dim]
        self.extents[dim] = loop.count * turn
        return True

    def cut(self, loop: Loop) -> list[_Turns]:
        """The loop in parts that can be taken one by one: its rows where it runs over their end, or single turns."""
        dim = self._dim(loop)
        if dim is None or loop.step != self._steps[dim] or self.extents[dim] != 1:
            return [_Turns(replace(loop, count=1), turn, 0) for turn in range(loop.count)]
        width = self._shape[dim]
        head = min(-self.offsets[dim] % width, loop.count)
        body = (loop.count - head) // width * width
        tail = loop.count - head - body
        parts = ((0, head, 0), (head, body, width), (head + body, tail, 0))
        return [_Turns(replace(loop, count=count), first, row) for first, count, row in parts if count]

    def _dim(self, loop: Loop) -> int | None:
        """The dim along which the loop moves: that of the largest step which divides its own."""
        dims = [dim for dim, size in enumerate(self._shape) if size > 1 and 0 < self._steps[dim] <= loop.step]
        dims = [dim for dim in dims if loop.step % self._steps[dim] == 0]
        return min(dims, key=lambda dim: (-self._steps[dim], dim)) if dims else None


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The same elements in fewer pieces: neighbours along a dim that are neighbours in memory become one."""
    joined = list(pieces)
    dims = len(joined[0].shape) if joined else 0
    for dim in reversed(range(dims)):
        rows: dict[object, list[Piece]] = defaultdict(list)
        for piece in joined:
            rows[_without(dim, piece)].append(piece)
        joined = [piece for row in rows.values() for piece in _joined_along(dim, row)]
    return sorted(joined, key=lambda piece: piece.offsets)


def _without(dim: int, piece: Piece) -> object:
    rest = [other for other in range(len(piece.shape)) if other != dim]
    return tuple((piece.offsets[other], piece.shape[other], piece.strides[other]) for other in rest)


def _joined_along(dim: int, row: list[Piece]) -> Iterator[Piece]:
    ordered = sorted(row, key=lambda piece: (piece.offsets[dim], piece.memory))
    current = ordered[0]
    for piece in itertools.islice(ordered, 1, None):
        both = _joined(dim, current, piece)
        if both is None:
            yield current
        current = both or piece
    yield current


def _joined(dim: int, left: Piece, right: Piece) -> Piece | None:
    extent, further = left.shape[dim], right.memory - left.memory
    stride = further // extent
    fits = (
        right.offsets[dim] == left.offsets[dim] + extent
        and stride > 0
        and further == stride * extent
        and (extent == 1 or left.strides[dim] == stride)
        and (right.shape[dim] == 1 or right.strides[dim] == stride)
    )
    if not fits:
        return None
    shape, strides = list(left.shape), list(left.strides)
    shape[dim] += right.shape[dim]
    strides[dim] = stride
    return replace(left, shape=tuple(shape), strides=tuple(strides))
