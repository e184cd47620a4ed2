"""Plans a refit: which source rank sends which slice of which tensor to which sink rank.

The plan is a pure function of two manifests and a topology; it moves no bytes. A slice is a box of elements. Every
rank that computes a plan from the same manifests gets the same plan. Each sink rank receives exactly the elements of
its own boxes, each once: the lower bound of any plan. Tensors of equal shape, element size and layouts are planned
together, since a model has tens of thousands of tensors of few kinds.

* Where several source ranks hold a box, the one that has the least to send so far sends it. Boxes with the fewest
  holders are given out first and, among those, the largest; a box above its sender's fair share is cut. Where sets of
  replicas are nested or disjoint, as FSDP, HSDP and tensor parallelism make them, no source rank sends more than
  twice what the best plan of all, which may cut at will, asks of its busiest: see `_balance`. (Where sets cross, a
  choice of the least busy is known to stay within log2(ranks) + 1 of the best choice: Azar, Naor and Rom, 1992.)
* A source rank on the node that needs the box goes before all others: those bytes touch no network card.
* Where several sink ranks of one node need the same box, one of them receives it and relays it to the others, so that
  it enters the node once: N replicas of a model on a node would otherwise pull N copies through its network card.
  Relaying is shared out by the same rule. Without a topology every rank is a node of its own, and nothing is relayed.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rl_refit.buckets import split
from rl_refit.errors import CoverageError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta, prove_coverage

__all__ = ["EqualTensors", "RefitPlan", "Route", "RouteStack", "Topology", "Way", "plan_refit"]

Way = tuple[int, tuple[int, ...]]
"""A source rank, and the sink ranks that a route goes to: the first receives it and relays it to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The node of each rank of both sides. Nodes are any strings, such as host names; equal ones are one node."""

    source_nodes: tuple[str, ...]
    """Node of source rank 0, 1, 2, …"""

    sink_nodes: tuple[str, ...]
    """Node of sink rank 0, 1, 2, …"""

    def check(self, *, source_ranks: Iterable[int], sink_ranks: Iterable[int]) -> None:
        """Pass where every rank has a node.

        Raises:
            ValueError: A rank has none; names it.
        """
        for side, nodes, ranks in (("source", self.source_nodes, source_ranks), ("sink", self.sink_nodes, sink_ranks)):
            last = max(ranks, default=-1)
            if last >= len(nodes):
                raise ValueError(f"the topology names nodes for {len(nodes)} {side} ranks, and there is a rank {last}")


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


@dataclass(frozen=True, slots=True)
class RouteStack:
    """The same box of equal tensors: one route for each of them."""

    box: Region
    """Where it lies in each tensor; its name is empty."""

    nbytes: int
    """Bytes of the box, counted once."""

    ways: tuple[Way, ...]
    """Of each tensor, in order; a single one is that of all."""


@dataclass(frozen=True, slots=True)
class EqualTensors:
    """Tensors of one shape, size of element and layout on both sides, such as a matrix of every layer."""

    names: tuple[str, ...]
    """In the order of the sink's manifest."""

    stacks: tuple[RouteStack, ...]


@dataclass(frozen=True)
class RefitPlan:
    """All routes of a refit, with what they cost.

    A model has tens of thousands of tensors and some hundred kinds of them, so routes are kept by kind: a plan of
    millions of routes takes seconds, and the memory of those that are looked at.
    """

    tensors: tuple[EqualTensors, ...]
    source: Manifest
    sink: Manifest
    topology: Topology | None = None

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Every route, in the order of the sink's manifest. Of a large cluster they are millions: see `routes_of`."""
        return tuple(
            self._in_order((kind, stack, None) for kind, each in enumerate(self.tensors) for stack in each.stacks)
        )

    def routes_of(self, way: Way) -> tuple[Route, ...]:
        """The routes from one source rank to these sink ranks, in the order of the sink's manifest."""
        return tuple(self._in_order(self._by_way[way]))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Every pair of a source rank and the sink ranks of a route, in order."""
        return tuple(sorted(self._by_way))

    @cached_property
    def num_routes(self) -> int:
        """How many routes there are."""
        return sum(len(each.names) * len(each.stacks) for each in self.tensors)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that all sink ranks receive."""
        return sum(nbytes * len(sinks) for (_, sinks), nbytes in self.bytes_by_way.items())

    @cached_property
    def bytes_by_way(self) -> Counter[Way]:
        """Bytes of all routes of each way, counted once for all its sink ranks."""
        total: Counter[Way] = Counter()
        for each in self.tensors:
            for stack in each.stacks:
                if len(stack.ways) == 1:
                    total[stack.ways[0]] += stack.nbytes * len(each.names)
                else:
                    for way in stack.ways:
                        total[way] += stack.nbytes
        return total

    def bytes_received(self, rank: int) -> int:
        """Bytes that sink rank `rank` receives, from sources and relays."""
        return self._moved[0][rank]

    def bytes_sent(self, rank: int) -> int:
        """Bytes that source rank `rank` sends."""
        return self._moved[1][rank]

    def bytes_relayed(self, rank: int) -> int:
        """Bytes that sink rank `rank` hands on to others of its node."""
        return self._moved[2][rank]

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
    def _moved(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Bytes that each sink rank receives, each source rank sends, and each sink rank relays."""
        received, sent, relayed = Counter[int](), Counter[int](), Counter[int]()
        for (source, sinks), nbytes in self.bytes_by_way.items():
            sent[source] += nbytes
            relayed[sinks[0]] += nbytes * (len(sinks) - 1)
            for rank in sinks:
                received[rank] += nbytes
        return received, sent, relayed

    @cached_property
    def _bounds(self) -> Counter[int]:
        bounds = Counter[int]()
        for each in self.tensors:
            meta = self.sink.by_name[each.names[0]]
            for rank, boxes in meta.regions().items():
                bounds[rank] += len(each.names) * sum(box.numel for box in boxes) * meta.torch_dtype.itemsize
        return bounds

    @cached_property
    def _hash(self) -> str:
        total = hashlib.sha256(f"{self.source.hash()} {self.sink.hash()}".encode())
        for each in self.tensors:
            stacks = [(stack.box.offsets, stack.box.shape, stack.ways) for stack in each.stacks]
            total.update(f"\n{each.names} {stacks}".encode())
        return total.hexdigest()

    @cached_property
    def _by_way(self) -> dict[Way, list[tuple[int, RouteStack, list[int] | None]]]:
        """The stacks of each way: the kind of tensor, and which of its tensors go this way; None for all."""
        found: dict[Way, list[tuple[int, RouteStack, list[int] | None]]] = {}
        for kind, each in enumerate(self.tensors):
            for stack in each.stacks:
                if len(stack.ways) == 1:
                    found.setdefault(stack.ways[0], []).append((kind, stack, None))
                else:
                    numbers: dict[Way, list[int]] = {}
                    for number, way in enumerate(stack.ways):
                        numbers.setdefault(way, []).append(number)
                    for way, chosen in numbers.items():
                        found.setdefault(way, []).append((kind, stack, chosen))
        return found

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each tensor in the sink's manifest."""
        return {name: number for number, name in enumerate(self.sink.by_name)}

    def _in_order(self, chosen: Iterable[tuple[int, RouteStack, list[int] | None]]) -> Iterator[Route]:
        """Routes of stacks, tensor by tensor; of one tensor in the order in which its stacks are given."""
        by_name: dict[str, list[Route]] = {}
        for kind, stack, numbers in chosen:
            names = self.tensors[kind].names
            for number in range(len(names)) if numbers is None else numbers:
                source_rank, sink_ranks = stack.ways[number if len(stack.ways) > 1 else 0]
                route = Route(
                    region=Region(names[number], stack.box.offsets, stack.box.shape),
                    source_rank=source_rank,
                    sink_ranks=sink_ranks,
                    nbytes=stack.nbytes,
                )
                by_name.setdefault(names[number], []).append(route)
        return itertools.chain.from_iterable(by_name[name] for name in sorted(by_name, key=self.places.__getitem__))


@dataclass(frozen=True, slots=True)
class _Need:
    """A box that all of `holders` hold and all of `receivers` need, both ascending; the same of `count` tensors.

    Where the receivers are of one node, one of the holders sends it, to one of them, who hands it on to the others.
    """

    box: Region
    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    count: int


_WORTH_A_ROUTE = 2**20
"""Bytes: smaller boxes are not cut for the sake of balance, since a message of its own costs as much."""


def plan_refit(source: Manifest, sink: Manifest, topology: Topology | None = None) -> RefitPlan:
    """Route every byte that the sink needs from a rank of the source that has it.

    Raises:
        CoverageError: The two do not hold the same tensors, or no rank of the source holds some part of one; lists
            every difference.
        ValueError: The topology leaves out a rank.
    """
    names, needs = _needs(source, sink, topology)
    needs = _cut(needs, len(source.ranks), len(sink.ranks))
    flat = [need for of_kind in needs for need in of_kind]
    counts = [need.count for need in flat]
    senders = iter(_balance([need.holders for need in flat], [need.nbytes for need in flat], counts))
    loads = [need.nbytes * (len(need.receivers) - 1) for need in flat]
    firsts = iter(_balance([need.receivers for need in flat], loads, counts))
    tensors = tuple(
        EqualTensors(
            tuple(each),
            tuple(RouteStack(need.box, need.nbytes, _ways(need, next(senders), next(firsts))) for need in of_kind),
        )
        for each, of_kind in zip(names, needs, strict=True)
    )
    return RefitPlan(tensors, source, sink, topology)


def _ways(need: _Need, senders: tuple[int, ...], firsts: tuple[int, ...]) -> tuple[Way, ...]:
    """Who sends to whom, for each tensor; a single way where it is that of all."""
    if len(need.receivers) == 1:
        return tuple((sender, need.receivers) for sender in senders)
    relayed = {first: (first, *(rank for rank in need.receivers if rank != first)) for first in set(firsts)}
    if len(senders) == 1:
        senders *= len(firsts)
    return tuple((sender, relayed[first]) for sender, first in zip(senders, firsts, strict=True))


def _needs(source: Manifest, sink: Manifest, topology: Topology | None) -> tuple[list[list[str]], list[list[_Need]]]:
    """The names of each kind of tensor that is sent, in the order of the first of each; and what is needed of one."""
    if topology is not None:
        topology.check(source_ranks=source.ranks, sink_ranks=sink.ranks)
    kinds: dict[tuple[object, ...], list[str]] = {}
    number_of = _numbering()
    for name in prove_coverage(source, sink):
        meta = sink.by_name[name]
        layouts = number_of(source.by_name[name].layout), number_of(meta.layout)
        kinds.setdefault((meta.shape, meta.torch_dtype.itemsize, *layouts), []).append(name)
    needs: list[list[_Need]] = []
    unheld: list[str] = []
    for names in kinds.values():
        meta = sink.by_name[names[0]]
        of_kind, holes = _overlaps(source.by_name[names[0]].layout, meta, count=len(names))
        unheld += [
            f"{name}: no rank of the source holds {list(box.shape)} at {list(box.offsets)}"
            for name in names
            for box in holes
        ]
        needs.append([part for need in of_kind for part in _by_node(need, topology)])
    if unheld:
        lines = "".join(f"\n  {line}" for line in unheld)
        raise CoverageError(f"{len(unheld)} parts of tensors that nobody can send:{lines}", mismatched=tuple(unheld))
    return list(kinds.values()), needs


def _numbering() -> Callable[[Layout], int]:
    """Equal layouts have one number; to hash one takes long, and most tensors have the very object of another."""
    by_object: dict[int, int] = {}
    by_value: dict[Layout, int] = {}

    def number_of(layout: Layout) -> int:
        if id(layout) not in by_object:  # both manifests keep their layouts alive
            by_object[id(layout)] = by_value.setdefault(layout, len(by_value))
        return by_object[id(layout)]

    return number_of


def _by_node(need: _Need, topology: Topology | None) -> Iterator[_Need]:
    """The same box for each node that needs it, from holders on that node where there are any."""
    if topology is None:
        yield from (replace(need, receivers=(rank,)) for rank in need.receivers)
        return
    nodes: dict[str, list[int]] = {}
    for rank in need.receivers:
        nodes.setdefault(topology.sink_nodes[rank], []).append(rank)
    for node, receivers in nodes.items():
        near = tuple(rank for rank in need.holders if topology.source_nodes[rank] == node)
        yield replace(need, holders=near or need.holders, receivers=tuple(receivers))


def _cut(needs: list[list[_Need]], num_sources: int, num_sinks: int) -> list[list[_Need]]:
    """Cut what is more than one sender's, or one relay's, fair share, where there is another to share with."""
    flat = [need for of_kind in needs for need in of_kind]
    sent = sum(need.nbytes * need.count for need in flat)
    relayed = sum(need.nbytes * (len(need.receivers) - 1) * need.count for need in flat)

    def parts(need: _Need) -> list[_Need]:
        copies = len(need.receivers) - 1
        limits = [sent // num_sources] if len(need.holders) > 1 else []
        limits += [relayed // num_sinks // copies] if copies else []
        limit = max(_WORTH_A_ROUTE, min(limits, default=need.nbytes))
        if need.nbytes <= limit:
            return [need]
        itemsize = need.nbytes // need.box.numel
        return [
            replace(need, box=part, nbytes=part.numel * itemsize)
            for part in split(need.box, max_elements=limit // itemsize)
        ]

    return [[part for need in of_kind for part in parts(need)] for of_kind in needs]


def _balance(
    candidates: Sequence[tuple[int, ...]], loads: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each of `counts[i]` equal loads the candidate that has the least so far; a single one is that of all.

    Fewest candidates first, then the largest load. Let the sets of candidates be nested or disjoint, as the replicas of
    one mesh are. When a load with candidates H is given out, all that H has so far was given out before, so to subsets
    of H: the least loaded of H has at most what the best cutting of all loads gives the busiest. So nobody ends above
    that plus one load that had a choice.
    """
    totals: Counter[int] = Counter()
    chosen: list[tuple[int, ...]] = [()] * len(loads)
    for number in sorted(range(len(loads)), key=lambda number: (len(candidates[number]), -loads[number])):
        ranks, load, count = candidates[number], loads[number], counts[number]
        if len(ranks) == 1:
            chosen[number] = ranks
            totals[ranks[0]] += load * count
            continue
        least = [(totals[rank], rank) for rank in ranks]
        heapq.heapify(least)
        given = []
        for _ in range(count):
            total, rank = least[0]
            heapq.heapreplace(least, (total + load, rank))
            given.append(rank)
        chosen[number] = tuple(given)
        totals.update({rank: total - totals[rank] for total, rank in least})
    return chosen


def _overlaps(source: Layout, sink: TensorMeta, *, count: int) -> tuple[list[_Need], list[Region]]:
    """What is needed, cut into boxes that a rank holds, each element once; and what no rank holds."""
    held, itemsize = _replicas(sink.shape, source), sink.torch_dtype.itemsize
    overlaps: list[_Need] = []
    holes: list[Region] = []
    for wanted, receivers in _replicas(sink.shape, sink.layout).items():
        missing = [wanted]
        for box, holders in held.items():
            shared = [part for part in map(box.intersect, missing) if part is not None]
            overlaps += (_Need(part, part.numel * itemsize, holders, receivers, count) for part in shared)
            if shared:
                missing = list(itertools.chain.from_iterable(part.minus(box) for part in missing))
            if not missing:
                break
        holes += missing
    return overlaps, holes


def _replicas(shape: tuple[int, ...], layout: Layout) -> dict[Region, tuple[int, ...]]:
    """Each distinct box of a layout and the ranks that hold it, in the order of the boxes."""
    ranks: dict[Region, list[int]] = {}
    for rank, boxes in layout.regions("", shape).items():
        for box in boxes:
            ranks.setdefault(box, []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: (item[0].offsets, item[0].shape))
    return {region: tuple(sorted(holders)) for region, holders in ordered}
