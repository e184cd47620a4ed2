"""Cut boxes into pieces that fit a bucket, and pack the pieces in order: a pure function both sides can derive.

A box too large for a bucket is cut along its first dims, so that every piece is again a box and the pieces, in order,
are the box flattened row by row.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rl_refit.layout import Region

__all__ = ["ALIGNMENT", "DEFAULT_BUCKET_BYTES", "Bucket", "Piece", "check_bucket_bytes", "pack", "size_of", "split"]

ALIGNMENT = 512
"""Bytes between the starts of pieces are a multiple of this: whole cache lines, and what copy engines of GPUs like."""

DEFAULT_BUCKET_BYTES = 4 * 2**20
"""On CPUs small buckets win, because both copies of a bucket then meet in the last-level cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box and the place of its bytes in a bucket."""

    region: Region
    start: int
    nbytes: int


Bucket = tuple[Piece, ...]
"""Pieces that travel together, each at its own place."""


def size_of(bucket: Bucket) -> int:
    """Bytes from the start of a bucket to the end of its last piece."""
    return bucket[-1].start + bucket[-1].nbytes


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Pass if buckets can be as large as this.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    if bucket_bytes is not None and (bucket_bytes < ALIGNMENT or bucket_bytes % ALIGNMENT):
        raise ValueError(f"a bucket is a positive multiple of {ALIGNMENT} bytes; got bucket_bytes={bucket_bytes}")


def pack(regions: Iterable[tuple[Region, int]], *, bucket_bytes: int | None) -> tuple[Bucket, ...]:
    """Pack regions, given with the bytes of one of their elements, into buckets in order; empty ones take no place.

    None puts all of them, uncut, into one bucket.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    check_bucket_bytes(bucket_bytes)
    if bucket_bytes is None:
        bucket_bytes = sys.maxsize // ALIGNMENT * ALIGNMENT
    buckets: list[list[Piece]] = [[]]
    end = 0
    for region, itemsize in regions:
        for part in split(region, max_elements=bucket_bytes // itemsize):
            nbytes = part.numel * itemsize
            if end + nbytes > bucket_bytes:
                buckets.append([])
                end = 0
            buckets[-1].append(Piece(part, end, nbytes))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(tuple(bucket) for bucket in buckets if bucket)


def split(region: Region, *, max_elements: int) -> Iterator[Region]:
    """Cut `region` into boxes of at most `max_elements`, in row-major order; nothing for an empty one."""
    if region.numel <= max_elements:
        if region.numel:
            yield region
        return
    dim = next(d for d, size in enumerate(region.shape) if size > 1)
    rows = max(1, max_elements // (region.numel // region.shape[dim]))
    for first in range(0, region.shape[dim], rows):
        offsets, shape = list(region.offsets), list(region.shape)
        offsets[dim], shape[dim] = offsets[dim] + first, min(rows, shape[dim] - first)
        part = dataclasses.replace(region, offsets=tuple(offsets), shape=tuple(shape))
        yield from split(part, max_elements=max_elements)
