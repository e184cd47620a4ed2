"""Boxes of strided loops, against counting."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from rl_refit.tracing.strided import Loop, Piece, join_pieces, pieces_of_loops, row_major


def visited(loops, start, memory):
    """Every pair of an element and its place in memory, one loop inside the other."""
    for turns in itertools.product(*(range(loop.count) for loop in loops)):
        moves = list(zip(turns, loops, strict=True))
        yield (
            start + sum(turn * loop.step for turn, loop in moves),
            memory + sum(turn * loop.stride for turn, loop in moves),
        )


def spelled(pieces, shape):
    steps = row_major(shape)
    for piece in pieces:
        for index in itertools.product(*map(range, piece.shape)):
            place = [start + at for start, at in zip(piece.offsets, index, strict=True)]
            assert all(at < size for at, size in zip(place, shape, strict=True))
            yield (
                sum(at * step for at, step in zip(place, steps, strict=True)),
                piece.memory + sum(at * stride for at, stride in zip(index, piece.strides, strict=True)),
            )


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(st.data())
def test_pieces_visit_what_the_loops_visit(data):
    shape = data.draw(SHAPES)
    start = data.draw(st.integers(0, math.prod(shape) - 1))
    room, loops = math.prod(shape) - 1 - start, []
    for _ in range(data.draw(st.integers(0, 3))):
        step = data.draw(st.integers(0, max(0, room)))
        count = data.draw(st.integers(1, min(6, room // step + 1) if step else 2))
        room -= (count - 1) * step
        loops.append(Loop(count, step, data.draw(st.integers(1, 7))))
    pieces = list(pieces_of_loops(shape, loops, start=start, memory=3))
    expected = sorted(visited(loops, start, 3))
    assert sorted(spelled(pieces, shape)) == expected
    assert sorted(spelled(join_pieces(pieces), shape)) == expected


@given(st.data())
def test_a_view_of_a_box_is_one_piece(data):
    shape = data.draw(SHAPES)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    order = data.draw(st.permutations(range(len(shape))))
    steps = row_major(shape)
    memory_strides = dict(zip(order, row_major([box[dim] for dim in order]), strict=True))
    loops = [Loop(box[dim], steps[dim], memory_strides[dim]) for dim in range(len(shape))]
    start = sum(at * step for at, step in zip(offsets, steps, strict=True))
    (piece,) = pieces_of_loops(shape, data.draw(st.permutations(loops)), start=start)
    assert (piece.offsets, piece.shape) == (offsets, box)


@given(st.data())
def test_a_box_that_was_cut_is_joined_again(data):
    shape = data.draw(SHAPES)
    pieces = [Piece((0,) * len(shape), shape, 0, row_major(shape))]
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        pieces = [part for piece in pieces for part in cut(piece, dim, at)]
    (joined,) = join_pieces(pieces)
    assert (joined.offsets, joined.shape, joined.memory) == ((0,) * len(shape), shape, 0)


def cut(piece, dim, at):
    at -= piece.offsets[dim]
    if not 0 < at < piece.shape[dim]:
        return [piece]

    def part(start, size):
        offsets, shape, strides = list(piece.offsets), list(piece.shape), list(piece.strides)
        offsets[dim] += start
        shape[dim] = size
        memory = piece.memory + start * strides[dim]
        strides = [stride if n > 1 else 1 for stride, n in zip(strides, shape, strict=True)]
        return Piece(tuple(offsets), tuple(shape), memory, tuple(strides))

    return [part(0, at), part(at, piece.shape[dim] - at)]
