"""Which box of a tensor each rank holds, as plain data.

Knows no process group and moves nothing. A `Layout` is what DTensor calls a device mesh and placements, cut down to
`Shard(dim)` and `Replicate()`, so that both sides of a refit can compare, hash and plan it without starting torch's
distributed machinery.

Along each axis of the mesh, in order, a sharded dim of n elements is cut as `torch.chunk` cuts it: pieces of
ceil(n / size), the last ones shorter or empty. Several axes may cut one dim, each cutting what the one before left.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_refit.errors import RefitError

__all__ = ["Layout", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the tensor `name`: the elements with `offsets[d] <= index[d] < offsets[d] + shape[d]` in every dim d."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape) or any(n < 0 for n in (*self.offsets, *self.shape)):
            raise ValueError(
                f"a region needs one offset and one size a dim, none negative; "
                f"got offsets={self.offsets} and shape={self.shape} for {self.name!r}"
            )

    @property
    def numel(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)

    def intersect(self, other: Region) -> Region | None:
        """The box that both hold, under this region's name; None where they share no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self._sides(), *other._sides(), strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(self.name, starts, shape) if min(shape, default=1) > 0 else None

    def index_within(self, outer: Region) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds just `outer`, as an index."""
        starts = [start - origin for start, origin in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))

    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets, self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a tensor lies on a mesh of ranks. `Layout.whole()` is one rank that holds everything."""

    mesh_shape: tuple[int, ...]
    """Size of each axis of the mesh; empty for a single rank."""

    sharded_dims: tuple[int | None, ...]
    """For each axis of the mesh the dim of the tensor that it cuts, or None where it replicates."""

    ranks: tuple[int, ...]
    """The ranks of the mesh, in row-major order of its axes."""

    def __post_init__(self) -> None:
        size = math.prod(self.mesh_shape)
        if len(self.mesh_shape) != len(self.sharded_dims) or size < 1:
            raise ValueError(
                f"a layout needs one placement for each axis of a mesh that is not empty; "
                f"got mesh_shape={self.mesh_shape} and sharded_dims={self.sharded_dims}"
            )
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise ValueError(f"a mesh of shape {self.mesh_shape} needs {size} distinct ranks; got ranks={self.ranks}")
        if any(dim is not None and dim < 0 for dim in self.sharded_dims):
            raise ValueError(f"sharded dims are counted from the first; got sharded_dims={self.sharded_dims}")

    @classmethod
    def whole(cls, rank: int = 0) -> Layout:
        """One rank, `rank`, holds the whole tensor."""
        return cls(mesh_shape=(), sharded_dims=(), ranks=(rank,))

    @classmethod
    def from_placements(
        cls, mesh_shape: Sequence[int], placements: Sequence[object], *, ranks: Iterable[int] | None = None
    ) -> Layout:
        """The layout of a mesh of `mesh_shape` with one placement for each of its axes.

        Args:
            mesh_shape: Size of each axis.
            placements: torch's `Shard(dim)` and `Replicate()`, or plainly the sharded dim and None.
            ranks: The ranks in row-major order; 0, 1, 2, … where left out.

        Raises:
            RefitError: A placement is of another kind, such as `Partial` or FSDP × TP's `_StridedShard`.
            ValueError: The numbers do not fit one another.
        """
        return cls(
            mesh_shape=tuple(mesh_shape),
            sharded_dims=tuple(_sharded_dim(placement) for placement in placements),
            ranks=tuple(range(math.prod(mesh_shape)) if ranks is None else ranks),
        )

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Layout:
        """The layout of a DTensor, or of a plain tensor, which this process's rank holds whole.

        Raises:
            RefitError: The DTensor has a placement other than `Shard` and `Replicate`.
        """
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import DTensor

            if isinstance(tensor, DTensor):
                ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
                return cls.from_placements(tensor.device_mesh.shape, tensor.placements, ranks=ranks)
        return cls.whole(this_rank())

    def regions(self, name: str, shape: tuple[int, ...]) -> dict[int, Region]:
        """The box of tensor `name`, of global `shape`, that each rank holds; boxes may be empty.

        Raises:
            ValueError: A sharded dim is not a dim of `shape`.
        """
        if any(dim is not None and dim >= len(shape) for dim in self.sharded_dims):
            raise ValueError(f"{name!r} has {len(shape)} dims, and its layout cuts dims {self.sharded_dims}")
        coordinates = itertools.product(*map(range, self.mesh_shape))
        return {
            rank: self._region_at(Region(name, (0,) * len(shape), shape), coordinate)
            for rank, coordinate in zip(self.ranks, coordinates, strict=True)
        }

    def _region_at(self, region: Region, coordinate: tuple[int, ...]) -> Region:
        offsets, shape = list(region.offsets), list(region.shape)
        for size, dim, position in zip(self.mesh_shape, self.sharded_dims, coordinate, strict=True):
            if dim is not None:
                chunk = -(-shape[dim] // size)
                start = min(position * chunk, shape[dim])
                offsets[dim] += start
                shape[dim] = min(chunk, shape[dim] - start)
        return Region(region.name, tuple(offsets), tuple(shape))


def _sharded_dim(placement: object) -> int | None:
    if placement is None or (isinstance(placement, int) and not isinstance(placement, bool)):
        return placement
    from torch.distributed.tensor import Replicate, Shard

    # Exactly these: a class derived from Shard cuts elsewhere.
    if type(placement) is Shard:
        return placement.dim
    if type(placement) is Replicate:
        return None
    raise RefitError(
        f"a refit knows the placements Shard(dim) and Replicate(), not {placement!r}; redistribute the tensor first"
    )


def this_rank() -> int:
    """This process's rank; 0 where torch.distributed is not initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
