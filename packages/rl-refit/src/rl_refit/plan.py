"""Who sends which box of which tensor to whom: a pure function of two manifests.

Moves nothing and knows no transport. Every rank that computes a plan from the same manifests gets the same plan. Each
sink rank receives exactly the elements of its own box, each once; that is the lower bound of any plan without relays.
Where several source ranks hold a box, the one that has the least to send so far sends it, the lowest rank first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rl_refit.buckets import DEFAULT_BUCKET_BYTES, Bucket, pack
from rl_refit.coverage import prove_coverage
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest

__all__ = ["RefitPlan", "Route", "plan_refit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One box that one source rank sends to one sink rank."""

    region: Region
    """What is sent; its name is the same on both sides."""

    source_rank: int
    """The rank of the source that sends it."""

    sink_rank: int
    """The rank of the sink that needs it."""

    nbytes: int
    """Bytes of the box."""


@dataclass(frozen=True)
class RefitPlan:
    """All routes of a refit, in the order of the sink's manifest, with what they cost."""

    routes: tuple[Route, ...]
    source: Manifest
    sink: Manifest

    def bytes_received(self, rank: int) -> int:
        """Bytes that sink rank `rank` receives."""
        return self._received[rank]

    def bytes_sent(self, rank: int) -> int:
        """Bytes that source rank `rank` sends."""
        return self._sent[rank]

    def lower_bound(self, rank: int) -> int:
        """Bytes that sink rank `rank` holds, ties counted once; no plan can send it less."""
        return sum(
            meta.regions()[rank].numel * meta.torch_dtype.itemsize
            for meta in self.sink.tensors
            if meta.tied_to is None and rank in meta.layout.ranks
        )

    def buckets(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[Bucket, ...]:
        """The routes cut and packed into buckets of `bucket_bytes`, every pair of ranks for itself."""
        pairs: dict[tuple[int, int], list[tuple[Region, int]]] = {}
        for route in self.routes:
            itemsize = self.sink.by_name[route.region.name].torch_dtype.itemsize
            pairs.setdefault((route.source_rank, route.sink_rank), []).append((route.region, itemsize))
        return tuple(bucket for pair in pairs.values() for bucket in pack(pair, bucket_bytes=bucket_bytes))

    def explain(self, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> str:
        """The plan as text: what is fed and tied, how much in how many buckets, and each rank beside its bound."""
        tied = [meta for meta in self.sink.tensors if meta.tied_to is not None]
        buckets, total = self.buckets(bucket_bytes), sum(self._received.values())
        lines = [
            f"{len(self.sink.tensors) - len(tied)} tensors fed, {len(tied)} tied to one of them, 0 unmatched",
            f"{total:,} bytes in {len(self.routes)} routes, {len(buckets)} buckets of at most {bucket_bytes:,} bytes",
            *(f"tied: {meta.name} -> {meta.tied_to}" for meta in tied),
            *(
                f"sink rank {rank} receives {self.bytes_received(rank):,} bytes, lower bound {self.lower_bound(rank):,}"
                for rank in self.sink.ranks
            ),
            *(f"source rank {rank} sends {self.bytes_sent(rank):,} bytes" for rank in self.source.ranks),
        ]
        return "\n".join(lines)

    @cached_property
    def _received(self) -> Counter[int]:
        return _sum_bytes((route.sink_rank, route.nbytes) for route in self.routes)

    @cached_property
    def _sent(self) -> Counter[int]:
        return _sum_bytes((route.source_rank, route.nbytes) for route in self.routes)


@dataclass(frozen=True, slots=True)
class _Overlap:
    """A box that all of `holders` hold and all of `receivers` need; both ascending."""

    box: Region
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def plan_refit(source: Manifest, sink: Manifest) -> RefitPlan:
    """Route every byte that the sink needs from a rank of the source that has it.

    Raises:
        CoverageError: The two do not hold the same tensors; lists every difference.
    """
    seen: dict[tuple[tuple[int, ...], Layout, Layout], tuple[_Overlap, ...]] = {}
    sent: Counter[int] = Counter()
    routes: list[Route] = []
    for name in prove_coverage(source, sink):
        meta, layouts = sink.by_name[name], (source.by_name[name].layout, sink.by_name[name].layout)
        key = (meta.shape, *layouts)  # a model has hundreds of tensors and a handful of shapes
        if key not in seen:
            seen[key] = tuple(_overlaps(meta.shape, *layouts))
        for overlap in seen[key]:
            region = Region(name, overlap.box.offsets, overlap.box.shape)
            nbytes = math.prod(region.shape) * meta.torch_dtype.itemsize
            for receiver in overlap.receivers:
                holder = min(overlap.holders, key=lambda rank: (sent[rank], rank))
                sent[holder] += nbytes
                routes.append(Route(region=region, source_rank=holder, sink_rank=receiver, nbytes=nbytes))
    return RefitPlan(tuple(routes), source, sink)


def _overlaps(shape: tuple[int, ...], source: Layout, sink: Layout) -> Iterator[_Overlap]:
    held, needed = _replicas(shape, source), _replicas(shape, sink)
    for wanted, receivers in needed.items():
        for box, holders in held.items():
            shared = wanted.intersect(box)
            if shared is not None:
                yield _Overlap(shared, holders, receivers)


def _replicas(shape: tuple[int, ...], layout: Layout) -> dict[Region, tuple[int, ...]]:
    """Each distinct box of a layout and the ranks that hold it, in the order of the boxes."""
    ranks: dict[Region, list[int]] = {}
    for rank, region in layout.regions("", shape).items():
        if region.numel:
            ranks.setdefault(region, []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: item[0].offsets)
    return {region: tuple(sorted(holders)) for region, holders in ordered}


def _sum_bytes(pairs: Iterator[tuple[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for rank, nbytes in pairs:
        total[rank] += nbytes
    return total
