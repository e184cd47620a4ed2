"""Which box of a tensor each rank holds, as plain data.

A `Layout` says it in one of two ways, so that both sides of a refit can compare, hash and plan it without starting
torch's distributed machinery:

* a mesh and, for each of its axes, the dim that it cuts: DTensor's `Shard(dim)`, `Replicate()`, and the
  `_StridedShard` that FSDP2 over tensor parallelism makes of a dim that both cut;
* plain boxes, a list for each rank: what Megatron, fused weights and permuted rows come to.

Along an axis of the mesh a sharded dim of n elements is cut as `torch.chunk` cuts it: pieces of ceil(n / size), the
last ones shorter or empty. Several axes may cut one dim, each cutting what the one before left: from left to right,
except that FSDP's strided axes come last, since FSDP2 shards what tensor parallelism has left (right to left).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_refit.errors import RefitError

__all__ = ["Layout", "Region", "is_dtensor", "local_part", "this_rank"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the tensor `name`: the elements with `offsets[d] <= index[d] < offsets[d] + shape[d]` in every dim d."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape) or (self.shape and (min(self.offsets) < 0 or min(self.shape) < 0)):
            raise ValueError(
                f"a region needs one offset and one size a dim, none negative; "
                f"got offsets={self.offsets} and shape={self.shape} for {self.name!r}"
            )

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Region:
        """All of the tensor `name`."""
        return cls(name, (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """The box that both hold, under this region's name; None where they share no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sides = zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        ends = (min(a + n, b + m) for a, n, b, m in sides)
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(self.name, starts, shape) if min(shape, default=1) > 0 else None

    def minus(self, other: Region) -> list[Region]:
        """This box without `other`, as boxes that do not overlap; at most two a dim."""
        shared = self.intersect(other)
        if shared is None:
            return [self]
        parts, offsets, shape = [], list(self.offsets), list(self.shape)
        for dim, (start, size) in enumerate(zip(shared.offsets, shared.shape, strict=True)):
            end = offsets[dim] + shape[dim]
            for first, last in ((offsets[dim], start), (start + size, end)):
                if first < last:
                    offsets[dim], shape[dim] = first, last - first
                    parts.append(Region(self.name, tuple(offsets), tuple(shape)))
            offsets[dim], shape[dim] = start, size
        return parts

    def index_within(self, outer: Region) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds just `outer`, as an index."""
        starts = [start - origin for start, origin in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor lies on ranks: `whole`, `from_placements`, `from_tensor` or `from_boxes` make one."""

    mesh_shape: tuple[int, ...] = ()
    """Size of each axis of the mesh; empty for a single rank, and for boxes."""

    sharded_dims: tuple[int | None, ...] = ()
    """For each axis of the mesh the dim of the tensor that it cuts, or None where it replicates."""

    strided_axes: tuple[int, ...] = ()
    """The axes of the mesh that cut their dim last: FSDP2's over tensor parallelism."""

    ranks: tuple[int, ...] = (0,)
    """The ranks of the mesh in row-major order of its axes, or the ranks that `boxes` lists, in their order."""

    boxes: tuple[tuple[Box, ...], ...] | None = None
    """For each of `ranks` its boxes, in the order in which it holds them; None for a mesh."""

    def __post_init__(self) -> None:
        size = math.prod(self.mesh_shape) if self.boxes is None else len(self.boxes)
        if len(self.mesh_shape) != len(self.sharded_dims) or size < 1:
            raise ValueError(
                f"a layout needs one placement for each axis of a mesh that is not empty; "
                f"got mesh_shape={self.mesh_shape} and sharded_dims={self.sharded_dims}"
            )
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise ValueError(f"a mesh of shape {self.mesh_shape} needs {size} distinct ranks; got ranks={self.ranks}")
        if any(dim is not None and dim < 0 for dim in self.sharded_dims):
            raise ValueError(f"sharded dims are counted from the first; got sharded_dims={self.sharded_dims}")
        for rank, held in zip(self.ranks, self.boxes or (), strict=False):
            overlap = _first_overlap(held)
            if overlap is not None:
                raise ValueError(f"the boxes of one rank must not overlap; on rank {rank} these do: {overlap}")

    @classmethod
    def whole(cls, rank: int = 0) -> Layout:
        """One rank, `rank`, holds the whole tensor."""
        return cls(ranks=(rank,))

    @classmethod
    def from_boxes(cls, boxes: Mapping[int, Iterable[Region]]) -> Layout:
        """Rank → the boxes that it holds, whatever their names; the boxes of one rank must not overlap."""
        return cls(
            ranks=tuple(boxes),
            boxes=tuple(tuple((box.offsets, box.shape) for box in held) for held in boxes.values()),
        )

    @classmethod
    def from_placements(
        cls, mesh_shape: Sequence[int], placements: Sequence[object], *, ranks: Iterable[int] | None = None
    ) -> Layout:
        """The layout of a mesh of `mesh_shape` with one placement for each of its axes.

        Args:
            mesh_shape: Size of each axis.
            placements: torch's `Shard(dim)`, `Replicate()` and FSDP2's `_StridedShard`, or plainly the sharded dim and
                None.
            ranks: The ranks in row-major order; 0, 1, 2, … where left out.

        Raises:
            RefitError: A placement is of another kind, such as `Partial`, or a strided one that is not FSDP2's.
            ValueError: The numbers do not fit one another.
        """
        read = [_read_placement(placement) for placement in placements]
        dims = tuple(dim for dim, _ in read)
        for axis, (dim, split_factor) in enumerate(read):
            right = math.prod(mesh_shape[other] for other in range(axis + 1, len(dims)) if dims[other] == dim)
            if split_factor not in (1, right):
                raise RefitError(
                    f"{placements[axis]!r} on axis {axis} of a mesh of shape {tuple(mesh_shape)} cuts {split_factor} "
                    f"pieces, and the axes to its right make {right} of dim {dim}; a refit knows FSDP2's strided "
                    f"placements only, so redistribute the tensor first"
                )
        return cls(
            mesh_shape=tuple(mesh_shape),
            sharded_dims=dims,
            strided_axes=tuple(axis for axis, (_, split_factor) in enumerate(read) if split_factor > 1),
            ranks=tuple(range(math.prod(mesh_shape)) if ranks is None else ranks),
        )

    @classmethod
    def from_tensor(cls, tensor: Any) -> Layout:
        """The layout of a DTensor, or of a plain tensor, which this process's rank holds whole.

        Raises:
            RefitError: The DTensor has a placement that `from_placements` refuses, or its local tensor is not the piece
                that its placements promise.
        """
        if not is_dtensor(tensor):
            return cls.whole(this_rank())
        mesh, placements = tensor.device_mesh, tensor.placements
        layout = cls.from_placements(mesh.shape, placements, ranks=mesh.mesh.flatten().tolist())
        promised = layout.regions_on(this_rank(), "", tuple(tensor.shape))
        local = tuple(local_part(tensor).shape)
        if math.prod(local) != sum(box.numel for box in promised) or any(box.shape != local for box in promised):
            raise RefitError(
                f"a DTensor of shape {list(tensor.shape)} with placements {placements} on a mesh of shape "
                f"{tuple(mesh.shape)} holds {list(local)} on rank {this_rank()}, and its placements promise "
                f"{[list(box.shape) for box in promised]}; redistribute it first"
            )
        return layout

    def regions(self, name: str, shape: tuple[int, ...]) -> dict[int, tuple[Region, ...]]:
        """The boxes of tensor `name`, of global `shape`, that each rank holds; empty boxes are left out.

        Raises:
            ValueError: A sharded dim is not a dim of `shape`, or a box is not inside it.
        """
        return {rank: self._held_at(place, name, shape) for place, rank in enumerate(self.ranks)}

    def regions_on(self, rank: int, name: str, shape: tuple[int, ...]) -> tuple[Region, ...]:
        """The boxes of tensor `name`, of global `shape`, that `rank` holds: `regions(name, shape)[rank]`, but cheaper.

        Empty where the layout does not know the rank. Raises as `regions` does.
        """
        return self._held_at(self.ranks.index(rank), name, shape) if rank in self.ranks else ()

    def _held_at(self, place: int, name: str, shape: tuple[int, ...]) -> tuple[Region, ...]:
        if self.boxes is not None:
            for at, size in self.boxes[place]:
                if len(size) != len(shape) or any(a + n > m for a, n, m in zip(at, size, shape, strict=True)):
                    raise ValueError(f"a box at {at} of shape {size} is not inside {name!r} of shape {shape}")
            return tuple(Region(name, *box) for box in self.boxes[place] if math.prod(box[1]))
        if any(dim is not None and dim >= len(shape) for dim in self.sharded_dims):
            raise ValueError(f"{name!r} has {len(shape)} dims, and its layout cuts dims {self.sharded_dims}")
        coordinate = [0] * len(self.mesh_shape)
        for axis in reversed(range(len(self.mesh_shape))):
            place, coordinate[axis] = divmod(place, self.mesh_shape[axis])
        offsets, sizes = [0] * len(shape), list(shape)
        axes = [axis for axis in range(len(self.mesh_shape)) if axis not in self.strided_axes]
        for axis in axes + sorted(self.strided_axes, reverse=True):
            dim = self.sharded_dims[axis]
            if dim is not None:
                chunk = -(-sizes[dim] // self.mesh_shape[axis])
                start = min(coordinate[axis] * chunk, sizes[dim])
                offsets[dim] += start
                sizes[dim] = min(chunk, sizes[dim] - start)
        return (Region(name, tuple(offsets), tuple(sizes)),) if math.prod(sizes) else ()


def _first_overlap(boxes: tuple[Box, ...]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, found by a sweep along the first dim; None where no two do."""
    open_boxes: list[Region] = []
    for offsets, shape in sorted(box for box in boxes if math.prod(box[1])):
        box = Region("", offsets, shape)
        open_boxes = [other for other in open_boxes if not shape or other.offsets[0] + other.shape[0] > offsets[0]]
        for other in open_boxes:
            if other.intersect(box) is not None:
                return (other.offsets, other.shape), (offsets, shape)
        open_boxes.append(box)
    return None


def _read_placement(placement: object) -> tuple[int | None, int]:
    """The dim that it cuts, and into how many pieces of each a strided one does so first."""
    if placement is None or (isinstance(placement, int) and not isinstance(placement, bool)):
        return placement, 1
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    # Exactly these: a class derived from Shard cuts elsewhere.
    if type(placement) is Shard:
        return placement.dim, 1
    if type(placement) is Replicate:
        return None, 1
    if type(placement) is _StridedShard:
        return placement.dim, int(placement.split_factor)
    raise RefitError(
        f"a refit knows the placements Shard(dim), Replicate() and FSDP2's _StridedShard, not {placement!r}; "
        f"redistribute the tensor first"
    )


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor. Where that is not imported no tensor is one, and importing it would take a second."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_part(tensor: Any) -> Tensor:
    """This rank's memory of a tensor, detached: of a DTensor its local tensor."""
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    part: Tensor = tensor.detach()
    return part


def this_rank() -> int:
    """This process's rank; 0 where torch.distributed is not initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
