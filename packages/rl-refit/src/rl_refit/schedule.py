"""A plan cut into buckets, in the one order in which every party works through its share: a pure function of the plan.

A *stream* is what one source rank sends one way: the same buckets to all sink ranks of a route.

Streams are ordered so that in each turn no rank takes part twice, as far as the numbers allow: source i begins with
sink i. Parties that all go through their own streams in this order never wait in a circle: the first unfinished stream
of all is always the next one of both its ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from rl_refit.buckets import Bucket, check_bucket_bytes, pack
from rl_refit.layout import Region
from rl_refit.plan import RefitPlan

__all__ = ["Schedule", "Stream", "make_schedule"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Stream:
    """The buckets that one source rank sends to one sink rank, or through it to others."""

    number: int
    """Its place in the schedule."""

    source_rank: int
    sink_ranks: tuple[int, ...]
    """Those of one node that need the same boxes; where they share no memory with the source, the first relays."""

    plan: RefitPlan = field(repr=False)
    bucket_bytes: int | None
    """Bytes of a bucket; None where the stream is one, as large as it needs."""

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Made when they are asked for: of most streams of a large cluster, a process needs but the number."""
        metas = self.plan.sink.by_name
        regions = [route.region for route in self.plan.routes_of((self.source_rank, self.sink_ranks))]
        ordered = _as_the_source_yields(regions, self.source_rank, self.plan)
        sized = [(region, metas[region.name].torch_dtype.itemsize) for region in ordered]
        return pack(sized, bucket_bytes=self.bucket_bytes)


@dataclass(frozen=True)
class Schedule:
    """All streams of a plan, in order."""

    streams: tuple[Stream, ...]
    plan: RefitPlan

    def of(self, *, source_rank: int | None = None, sink_rank: int | None = None) -> tuple[Stream, ...]:
        """The streams that the one rank sends, and those that the other takes part in, in order."""
        return tuple(each for each in self.streams if each.source_rank == source_rank or sink_rank in each.sink_ranks)

    @cached_property
    def num_buckets(self) -> int:
        """Buckets of all streams, which it makes."""
        return sum(len(stream.buckets) for stream in self.streams)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each tensor that travels, by name."""
        return {meta.name: meta.torch_dtype for meta in self.plan.sink.tensors if meta.travels}


def make_schedule(plan: RefitPlan, *, bucket_bytes: int | None) -> Schedule:
    """Cut `plan` into streams of buckets of at most `bucket_bytes`, or one bucket a stream where that is None.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    check_bucket_bytes(bucket_bytes)
    turns = max((*plan.source.ranks, *plan.sink.ranks), default=0) + 1
    ordered = sorted(plan.ways, key=lambda way: ((way[1][0] - way[0]) % turns, way[0], way[1]))
    streams = (
        Stream(number=number, source_rank=source, sink_ranks=sinks, plan=plan, bucket_bytes=bucket_bytes)
        for number, (source, sinks) in enumerate(ordered)
    )
    return Schedule(tuple(streams), plan)


def _as_the_source_yields(regions: list[Region], source_rank: int, plan: RefitPlan) -> list[Region]:
    """Sorted by tensor, in the sink's order, then by the source rank's box that each lies in, then by place."""
    order = plan.places
    boxes: dict[str, tuple[Region, ...]] = {}

    def place(region: Region) -> tuple[int, int, tuple[int, ...]]:
        if plan.source.by_name[region.name].layout.boxes is None:  # a mesh gives a rank one box
            return order[region.name], 0, region.offsets
        if region.name not in boxes:
            boxes[region.name] = plan.source.by_name[region.name].regions_on(source_rank)
        inside = next(number for number, box in enumerate(boxes[region.name]) if box.intersect(region) == region)
        return order[region.name], inside, region.offsets

    return sorted(regions, key=place)
