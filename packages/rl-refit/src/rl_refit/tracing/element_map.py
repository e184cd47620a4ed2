"""From the checkpoint element that each element of engine memory holds, to boxes.

Knows numbers, not loaders. A map is an integer tensor of the engine tensor's shape: the number of a checkpoint element,
counted over the named tensors one after the other, or a negative one where there is none. It is cut, along the dim that
needs the fewest cuts, until in each cell one step along any dim of the engine's memory is one constant step in one
named tensor; such a cell is a nest of loops, and `strided` makes boxes of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.tracing.strided import Loop, Piece, join_pieces, pieces_of_loops

__all__ = ["Numbering", "find_pieces", "find_regions"]

_NO_STEP = -(1 << 62)
"""Stands where two neighbouring slices are not one constant step apart."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """The elements of the named tensors, counted through in their order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    """Number of the first element of each, and behind the last one."""

    @property
    def total(self) -> int:
        """How many elements there are."""
        return self.starts[-1]

    def owners(self, index: Tensor) -> Tensor:
        """For each number the position in `names` of the tensor that has it; negative numbers stay as they are."""
        ends = torch.tensor(self.starts[1:], dtype=index.dtype)
        owner = torch.bucketize(index, ends, right=True, out_int32=True)
        return torch.where(index < 0, index.to(torch.int32), owner)


def find_pieces(
    engine_name: str, index: Tensor, numbering: Numbering, *, strides: Sequence[int], max_boxes: int
) -> dict[str, tuple[Piece, ...]]:
    """The boxes of each named tensor that a map holds.

    Args:
        engine_name: What to call the engine's tensor in an error.
        index: Its map.
        numbering: What the numbers in it mean.
        strides: The engine tensor's own strides: a piece's memory counts elements from its first one.
        max_boxes: How many there may be.

    Raises:
        RefitError: They are more than `max_boxes`: a map that is scattered, and not made of boxes.
    """
    found: dict[str, list[Piece]] = {}
    count = 0
    for cell in _cells(index, numbering.owners(index)):
        if cell.owner < 0:
            continue
        loops = [Loop(n, step, stride) for n, step, stride in zip(cell.shape, cell.steps, strides, strict=True)]
        memory = sum(offset * stride for offset, stride in zip(cell.offsets, strides, strict=True))
        pieces = found.setdefault(numbering.names[cell.owner], [])
        start = cell.first - numbering.starts[cell.owner]
        for piece in pieces_of_loops(numbering.shapes[cell.owner], loops, start=start, memory=memory):
            pieces.append(piece)
            count += 1
            if count > max_boxes:
                raise RefitError(
                    f"{engine_name!r}, of shape {list(index.shape)}, is more than max_boxes={max_boxes:,} boxes of "
                    f"checkpoint tensors such as {numbering.names[cell.owner]!r}: the loader scatters single elements; "
                    f"feed it whole through load_weights, or raise max_boxes",
                    tensor=engine_name,
                )
    return {name: tuple(join_pieces(pieces)) for name, pieces in found.items()}


def find_regions(name: str, mask: Tensor) -> tuple[Region, ...]:
    """The elements of tensor `name` at which `mask` is True, as boxes that do not overlap."""
    if not bool(mask.any()):
        return ()
    index = torch.where(mask, -1, -2)
    return tuple(Region(name, cell.offsets, cell.shape) for cell in _cells(index, index) if cell.owner == -1)


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of engine memory that is one step a dim of one named tensor, or has none of them."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    first: int
    steps: tuple[int, ...]


def _cells(index: Tensor, owner: Tensor, offsets: tuple[int, ...] | None = None) -> Iterator[_Cell]:
    if index.numel() == 0:
        return
    offsets = offsets or (0,) * index.dim()
    cuts = {dim: _segments(index, owner, dim) for dim in range(index.dim()) if index.shape[dim] > 1}
    cuts = {dim: segments for dim, segments in cuts.items() if len(segments) > 1}
    if not cuts:
        corner = (0,) * index.dim()
        first = int(index[corner])
        steps = (int(index[(*corner[:dim], 1, *corner[dim + 1 :])]) - first if n > 1 else 0 for dim, n in _dims(index))
        yield _Cell(offsets, tuple(index.shape), int(owner[corner]), first, tuple(steps))
        return
    dim = min(cuts, key=lambda candidate: len(cuts[candidate]))
    for start, stop in cuts[dim]:
        where = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _cells(index.narrow(dim, start, stop - start), owner.narrow(dim, start, stop - start), where)


def _dims(tensor: Tensor) -> Iterator[tuple[int, int]]:
    return enumerate(tensor.shape)


def _segments(index: Tensor, owner: Tensor, dim: int) -> list[tuple[int, int]]:
    """Where to cut `dim` so that within each part one step along it is the same step everywhere."""
    steps = _steps(index, owner, dim)
    values, counts = torch.unique_consecutive(steps, return_counts=True)
    starts, position, current = [0], 0, None
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        if value == _NO_STEP:
            starts += range(position + 1, position + count + 1)
            current = None
        elif current is None:
            current = value
        else:  # the first of these steps leads to the next part, the others are its own
            starts.append(position + 1)
            current = value if count > 1 else None
        position += count
    return list(itertools.pairwise([*starts, index.shape[dim]]))


def _steps(index: Tensor, owner: Tensor, dim: int) -> Tensor:
    """From each slice along `dim` to the next one the step of all elements, 0 where none is mapped, or `_NO_STEP`."""
    flat = index.movedim(dim, 0).flatten(1) if index.dim() > 1 else index[:, None]
    owners = owner.movedim(dim, 0).flatten(1) if owner.dim() > 1 else owner[:, None]
    step = flat[1:] - flat[:-1]
    mapped = owners[1:] >= 0
    some = mapped.any(1)
    common = step.gather(1, mapped.to(torch.uint8).argmax(1, keepdim=True))
    same = (((step == common) | ~mapped) & (owners[1:] == owners[:-1])).all(1)
    forward = common[:, 0].to(torch.int64)
    value = torch.where(same & (~some | (forward > 0)), forward, _NO_STEP)
    return torch.where(same & ~some, 0, value)
