"""Who sends which box of which tensor to whom: a pure function of two manifests and a topology.

Moves nothing and knows no transport. Every rank that computes a plan from the same manifests gets the same plan. Each
sink rank receives exactly the elements of its own boxes, each once: the lower bound of any plan.

* Where several source ranks hold a box, the one that has the least to send so far sends it. Boxes with the fewest
  holders are given out first and, among those, the largest; a box above its sender's fair share is cut. Where sets of
  replicas are nested or disjoint, as FSDP, HSDP and tensor parallelism make them, no source rank so sends more than
  twice what the best plan of all, which may cut at will, asks of its busiest: see `_balance`. (Where sets cross, a
  choice of the least busy is known to stay within log2(ranks) + 1 of the best choice: Azar, Naor and Rom, 1992.)
* A source rank on the node that needs the box goes before all others: those bytes touch no network card.
* Where several sink ranks of one node need the same box, one of them receives it and relays it to the others, so that
  it enters the node once: N replicas of a model on a node would otherwise pull N copies through its network card.
  Relaying is shared out by the same rule. Without a topology every rank is a node of its own, and nothing is relayed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_refit.buckets import split
from rl_refit.coverage import prove_coverage
from rl_refit.errors import CoverageError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest
from rl_refit.topology import Topology

__all__ = ["RefitPlan", "Route", "plan_refit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One box that one source rank sends, to one sink rank or through it to others of its node."""

    region: Region
    """What is sent; its name is the same on both sides."""

    source_rank: int
    """The rank of the source that sends it."""

    sink_ranks: tuple[int, ...]
    """The ranks of the sink that need it: the first receives it from the source and relays it to the others."""

    nbytes: int
    """Bytes of the box, counted once."""


@dataclass(frozen=True)
class RefitPlan:
    """All routes of a refit, in the order of the sink's manifest, with what they cost."""

    routes: tuple[Route, ...]
    source: Manifest
    sink: Manifest
    topology: Topology | None = None

    def bytes_received(self, rank: int) -> int:
        """Bytes that sink rank `rank` receives, from sources and relays."""
        return self._received[rank]

    def bytes_sent(self, rank: int) -> int:
        """Bytes that source rank `rank` sends."""
        return self._sent[rank]

    def bytes_relayed(self, rank: int) -> int:
        """Bytes that sink rank `rank` hands on to others of its node."""
        return self._relayed[rank]

    def lower_bound(self, rank: int) -> int:
        """Bytes that sink rank `rank` holds and cannot make itself, ties counted once; no plan can send it less."""
        return self._bounds[rank]

    def hash(self) -> str:
        """sha256 over the routes and both manifests, in hex: equal on every rank that made the same plan."""
        return self._hash

    def explain(self, *, bucket_bytes: int | None = None) -> str:
        """The plan as text: what is fed and tied, how much in how many buckets, and each rank beside its bound."""
        from rl_refit.explain import explain_plan

        return explain_plan(self, bucket_bytes=bucket_bytes)

    @cached_property
    def _received(self) -> Counter[int]:
        return _sum_bytes((rank, route.nbytes) for route in self.routes for rank in route.sink_ranks)

    @cached_property
    def _sent(self) -> Counter[int]:
        return _sum_bytes((route.source_rank, route.nbytes) for route in self.routes)

    @cached_property
    def _relayed(self) -> Counter[int]:
        return _sum_bytes((route.sink_ranks[0], route.nbytes * (len(route.sink_ranks) - 1)) for route in self.routes)

    @cached_property
    def _bounds(self) -> Counter[int]:
        return _sum_bytes(
            (rank, sum(box.numel for box in boxes) * meta.torch_dtype.itemsize)
            for meta in self.sink.tensors
            if meta.travels
            for rank, boxes in meta.regions().items()
        )

    @cached_property
    def _hash(self) -> str:
        total = hashlib.sha256(f"{self.source.hash()} {self.sink.hash()}".encode())
        for route in self.routes:
            box = route.region
            total.update(f"\n{box.name} {box.offsets} {box.shape} {route.source_rank} {route.sink_ranks}".encode())
        return total.hexdigest()


@dataclass(frozen=True, slots=True)
class _Overlap:
    """A box that all of `holders` hold and all of `receivers` need; both ascending."""

    box: Region
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Need:
    """A box that goes to one node: one of `holders` sends it, to one of `receivers`, who hands it on to the others."""

    region: Region
    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


_WORTH_A_ROUTE = 2**20
"""Bytes: smaller boxes are not cut for the sake of balance, since a message of its own costs as much."""


def plan_refit(source: Manifest, sink: Manifest, topology: Topology | None = None) -> RefitPlan:
    """Route every byte that the sink needs from a rank of the source that has it.

    Raises:
        CoverageError: The two do not hold the same tensors, or no rank of the source holds some part of one; lists
            every difference.
        ValueError: The topology leaves out a rank.
    """
    needs = _cut(_needs(source, sink, topology), len(source.ranks), len(sink.ranks))
    senders = _balance([need.holders for need in needs], [need.nbytes for need in needs])
    firsts = _balance([need.receivers for need in needs], [need.nbytes * (len(need.receivers) - 1) for need in needs])
    routes = (
        Route(
            region=need.region,
            source_rank=sender,
            sink_ranks=(first, *(rank for rank in need.receivers if rank != first)),
            nbytes=need.nbytes,
        )
        for need, sender, first in zip(needs, senders, firsts, strict=True)
    )
    return RefitPlan(tuple(routes), source, sink, topology)


def _needs(source: Manifest, sink: Manifest, topology: Topology | None) -> list[_Need]:
    seen: dict[tuple[tuple[int, ...], Layout, Layout], tuple[tuple[_Overlap, ...], tuple[Region, ...]]] = {}
    needs: list[_Need] = []
    unheld: list[str] = []
    if topology is not None:
        topology.check(source_ranks=source.ranks, sink_ranks=sink.ranks)
    for name in prove_coverage(source, sink):
        meta, layouts = sink.by_name[name], (source.by_name[name].layout, sink.by_name[name].layout)
        key = (meta.shape, *layouts)  # a model has hundreds of tensors and a handful of shapes
        if key not in seen:
            overlaps, holes = _overlaps(meta.shape, *layouts)
            seen[key] = tuple(part for overlap in overlaps for part in _by_node(overlap, topology)), holes
        overlaps, holes = seen[key]
        unheld += [f"{name}: no rank of the source holds {list(box.shape)} at {list(box.offsets)}" for box in holes]
        itemsize = meta.torch_dtype.itemsize
        for part in overlaps:
            region = Region(name, part.box.offsets, part.box.shape)
            needs.append(_Need(region, region.numel * itemsize, part.holders, part.receivers))
    if unheld:
        lines = "".join(f"\n  {line}" for line in unheld)
        raise CoverageError(f"{len(unheld)} parts of tensors that nobody can send:{lines}", mismatched=tuple(unheld))
    return needs


def _by_node(overlap: _Overlap, topology: Topology | None) -> Iterator[_Overlap]:
    """The same box for each node that needs it, from holders on that node where there are any."""
    if topology is None:
        yield from (_Overlap(overlap.box, overlap.holders, (rank,)) for rank in overlap.receivers)
        return
    nodes: dict[str, list[int]] = {}
    for rank in overlap.receivers:
        nodes.setdefault(topology.sink_nodes[rank], []).append(rank)
    for node, receivers in nodes.items():
        near = tuple(rank for rank in overlap.holders if topology.source_nodes[rank] == node)
        yield _Overlap(overlap.box, near or overlap.holders, tuple(receivers))


def _cut(needs: list[_Need], num_sources: int, num_sinks: int) -> list[_Need]:
    """Cut what is more than one sender's, or one relay's, fair share, where there is another to share with."""
    sent = sum(need.nbytes for need in needs)
    relayed = sum(need.nbytes * (len(need.receivers) - 1) for need in needs)
    cut: list[_Need] = []
    for need in needs:
        copies = len(need.receivers) - 1
        limits = [sent // num_sources] if len(need.holders) > 1 else []
        limits += [relayed // num_sinks // copies] if copies else []
        limit = max(_WORTH_A_ROUTE, min(limits, default=need.nbytes))
        if need.nbytes <= limit:
            cut.append(need)
        else:
            itemsize = need.nbytes // need.region.numel
            parts = split(need.region, max_elements=limit // itemsize)
            cut += [_Need(part, part.numel * itemsize, need.holders, need.receivers) for part in parts]
    return cut


def _balance(candidates: Sequence[tuple[int, ...]], loads: Sequence[int]) -> list[int]:
    """For each load the candidate that has the least so far; fewest candidates first, then the largest load.

    Let the sets of candidates be nested or disjoint, as the replicas of one mesh are. When a load with candidates H is
    given out, all that H has so far was given out before, so to subsets of H: the least loaded of H has at most what
    the best cutting of all loads gives the busiest. So nobody ends above that plus one load that had a choice.
    """
    totals: Counter[int] = Counter()
    chosen = [0] * len(loads)
    for number in sorted(range(len(loads)), key=lambda number: (len(candidates[number]), -loads[number])):
        ranks = candidates[number]
        chosen[number] = rank = ranks[0] if len(ranks) == 1 else min(ranks, key=lambda rank: (totals[rank], rank))
        totals[rank] += loads[number]
    return chosen


def _overlaps(shape: tuple[int, ...], source: Layout, sink: Layout) -> tuple[tuple[_Overlap, ...], tuple[Region, ...]]:
    """What is needed, cut into boxes that a rank holds, each element once; and what no rank holds."""
    held = _replicas(shape, source)
    overlaps: list[_Overlap] = []
    holes: list[Region] = []
    for wanted, receivers in _replicas(shape, sink).items():
        missing = [wanted]
        for box, holders in held.items():
            shared = [part for part in map(box.intersect, missing) if part is not None]
            overlaps += (_Overlap(part, holders, receivers) for part in shared)
            if shared:
                missing = list(itertools.chain.from_iterable(part.minus(box) for part in missing))
            if not missing:
                break
        holes += missing
    return tuple(overlaps), tuple(holes)


def _replicas(shape: tuple[int, ...], layout: Layout) -> dict[Region, tuple[int, ...]]:
    """Each distinct box of a layout and the ranks that hold it, in the order of the boxes."""
    ranks: dict[Region, list[int]] = {}
    for rank, boxes in layout.regions("", shape).items():
        for box in boxes:
            ranks.setdefault(box, []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: (item[0].offsets, item[0].shape))
    return {region: tuple(sorted(holders)) for region, holders in ordered}


def _sum_bytes(pairs: Iterable[tuple[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for rank, nbytes in pairs:
        total[rank] += nbytes
    return total
