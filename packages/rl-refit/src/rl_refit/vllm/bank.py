"""The staged weights in memory that the driver and the workers of an engine share.

The bank is one segment without a name; a worker opens it through the driver's open file and keeps it mapped, and the
driver closes the file as soon as all have. So whatever kills the processes, nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from rl_refit.buckets import ALIGNMENT
from rl_refit.digest import Digest, digest_regions
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import TensorMeta
from rl_refit.transports.memory import Segment

__all__ = ["Bank", "Row"]

Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and first byte: what a table of the bank says of one tensor."""


@final
@dataclass(frozen=True, slots=True)
class Bank:
    """Whole tensors by name, in one segment."""

    tensors: dict[str, Tensor]
    """Views of the segment."""

    table: tuple[Row, ...]

    @classmethod
    def create(cls, metas: Iterable[TensorMeta], directory: str) -> tuple[Bank, int]:
        """A bank with room for `metas`, and the descriptor of its file, which the caller closes.

        Raises:
            RefitError: The file system has no room for it.
        """
        rows: list[Row] = []
        end = 0
        for meta in metas:
            rows.append((meta.name, meta.dtype, meta.shape, end))
            end += -(-meta.total_bytes // ALIGNMENT) * ALIGNMENT
        segment, descriptor = Segment.create(directory, max(end, ALIGNMENT))
        return cls._over(segment, rows), descriptor

    @classmethod
    def attach(cls, path: str, identity: Sequence[int], rows: Iterable[Sequence[Any]]) -> Bank:
        """The bank of another process, which has its file open at `path`.

        Args:
            path: `/proc/<process>/fd/<descriptor>`.
            identity: Device, inode and bytes of the file, since the path may have come to mean another.
            rows: The bank's table.

        Raises:
            RefitError: The file is not to be had: the other process is on another host or in another container.
        """
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RefitError(
                f"cannot open the driver's shared memory {path}: {error.strerror}", phase="prepare"
            ) from error
        try:
            if (found := identity_of(descriptor)) != tuple(identity):
                raise RefitError(f"{path} is another file here: {found}, and the driver's is {tuple(identity)}")
            segment = Segment(descriptor, found[2])
        finally:
            os.close(descriptor)
        return cls._over(segment, [(name, dtype, tuple(shape), start) for name, dtype, shape, start in rows])

    @classmethod
    def _over(cls, segment: Segment, rows: list[Row]) -> Bank:
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape, start in rows:
            kind: torch.dtype = getattr(torch, dtype)
            nbytes = torch.Size(shape).numel() * kind.itemsize
            tensors[name] = segment.bytes[start : start + nbytes].view(kind).view(shape)
        return cls(tensors, tuple(rows))

    @property
    def whole(self) -> tuple[Region, ...]:
        """Every tensor as one box, in the order of the table."""
        return tuple(Region(name, (0,) * len(shape), shape) for name, _, shape, _ in self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the gaps between them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def view(self, region: Region) -> Tensor | None:
        """The part of the tensor `region.name` that is `region`; None where there is no such box."""
        tensor = self.tensors.get(region.name)
        if tensor is None or len(region.shape) != tensor.dim():
            return None
        view = tensor[region.index_within(Region(region.name, (0,) * tensor.dim(), tuple(tensor.shape)))]
        return view if tuple(view.shape) == region.shape else None

    def digest(self, regions: Iterable[Region]) -> Digest:
        """Of `regions`, as they are now."""
        return digest_regions(regions, self.view)


def identity_of(descriptor: int) -> tuple[int, int, int]:
    """Device, inode and bytes of an open file."""
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino, state.st_size
