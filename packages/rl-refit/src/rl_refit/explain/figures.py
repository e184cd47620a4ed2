"""Every number that `explain` prints of a plan, as plain data.

Knows the plan, the buckets and the two sides' nodes; does not know what anything is for, nor how it is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median

from rl_refit.plan import RefitPlan
from rl_refit.schedule import make_schedule

__all__ = ["PlanFigures", "Spread", "figures_of", "link_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One number a rank, over all ranks of a side."""

    least: int
    median: float
    most: int
    total: int

    busiest: int
    """The lowest rank that has `most`; -1 where there are no ranks."""

    ranks: int
    """How many there are."""

    @property
    def balance(self) -> float:
        """The most over the mean; 1 where all have the same."""
        return self.most * self.ranks / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a plan costs. Bytes, unless a name says otherwise."""

    fed: int
    """Tensors that are sent."""

    tied: int
    """Tensors that share the memory of another."""

    derived: int
    """Tensors that the engine recomputes."""

    constant: int
    """Tensors that never change."""

    in_boxes: int
    """Tensors of which some sink rank holds more than one box: fused, stacked or permuted storage."""

    weights: int
    """All fed tensors, once."""

    routes: int
    """Boxes that are sent."""

    buckets: int
    """Buckets of all streams, when each sink rank gets what it needs."""

    bucket_bytes: int
    """Size of a bucket."""

    slots: int
    """Buckets that a rank holds at once."""

    receives: Spread
    """By a sink rank, from sources and relays."""

    bound: Spread
    """By a sink rank at least, whatever the plan."""

    above_bound: int
    """Most that any sink rank receives above its lower bound."""

    sends: Spread
    """By a source rank."""

    relays: Spread
    """By a sink rank, to others of its node."""

    into_nodes: dict[str, tuple[int, int]]
    """Node of the sink → what enters it from other nodes, with relays and if each rank pulled; empty where unknown."""

    ring: int
    """Slots of buckets, on each rank of both sides."""

    stage: int
    """Most that a sink rank holds beside, if it is staged: all that it is fed."""

    link: int
    """Most bytes through one rank's link to other nodes: no refit by this plan is faster than that link."""

    link_without_relays: int
    """The same, if every sink rank pulled its own copy."""

    def to_plain(self) -> dict[str, object]:
        """As JSON takes it."""
        return asdict(self)


def figures_of(plan: RefitPlan, *, bucket_bytes: int, slots: int) -> PlanFigures:
    """Count.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    schedule = make_schedule(plan, bucket_bytes=bucket_bytes)
    sources, sinks = plan.source.ranks, plan.sink.ranks
    fed = [meta for meta in plan.sink.tensors if meta.travels]
    rest = Counter("tied" if meta.tied_to else meta.feeding for meta in plan.sink.tensors if not meta.travels)
    bound = _spread(sinks, plan.lower_bound)
    return PlanFigures(
        fed=len(fed),
        tied=rest["tied"],
        derived=rest["derived"],
        constant=rest["constant"],
        in_boxes=sum(any(len(boxes) > 1 for boxes in meta.layout.boxes or ()) for meta in fed),
        weights=sum(meta.total_bytes for meta in fed),
        routes=plan.num_routes,
        buckets=schedule.num_buckets,
        bucket_bytes=bucket_bytes,
        slots=slots,
        receives=_spread(sinks, plan.bytes_received),
        bound=bound,
        above_bound=max((plan.bytes_received(rank) - plan.lower_bound(rank) for rank in sinks), default=0),
        sends=_spread(sources, plan.bytes_sent),
        relays=_spread(sinks, plan.bytes_relayed),
        into_nodes=_into_nodes(plan),
        ring=slots * bucket_bytes,
        stage=bound.most,
        link=link_bytes(plan, relayed=True),
        link_without_relays=link_bytes(plan, relayed=False),
    )


def link_bytes(plan: RefitPlan, *, relayed: bool) -> int:
    """Most bytes that cross one rank's link to other nodes; without a topology every rank is a node of its own.

    With `relayed=False`, as if every sink rank pulled its copy from the same source rank itself.
    """
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for (source_rank, sink_ranks), nbytes in plan.bytes_by_way.items():
        if _stays_on_its_node(plan, source_rank, sink_ranks[0]):
            continue
        for rank in sink_ranks[:1] if relayed else sink_ranks:
            out[source_rank] += nbytes
            into[rank] += nbytes
    return max((*out.values(), *into.values()), default=0)


def _into_nodes(plan: RefitPlan) -> dict[str, tuple[int, int]]:
    if plan.topology is None:
        return {}
    nodes = plan.topology.sink_nodes
    into = dict.fromkeys((nodes[rank] for rank in plan.sink.ranks), (0, 0))
    for (source_rank, sink_ranks), nbytes in plan.bytes_by_way.items():
        if not _stays_on_its_node(plan, source_rank, sink_ranks[0]):
            relayed, pulled = into[nodes[sink_ranks[0]]]
            into[nodes[sink_ranks[0]]] = relayed + nbytes, pulled + nbytes * len(sink_ranks)
    return into


def _stays_on_its_node(plan: RefitPlan, source_rank: int, sink_rank: int) -> bool:
    topology = plan.topology
    return topology is not None and topology.source_nodes[source_rank] == topology.sink_nodes[sink_rank]


def _spread(ranks: Iterable[int], bytes_of: Callable[[int], int]) -> Spread:
    each = {rank: bytes_of(rank) for rank in ranks}
    if not each:
        return Spread(least=0, median=0, most=0, total=0, busiest=-1, ranks=0)
    most = max(each.values())
    return Spread(
        least=min(each.values()),
        median=median(each.values()),
        most=most,
        total=sum(each.values()),
        busiest=min(rank for rank, nbytes in each.items() if nbytes == most),
        ranks=len(each),
    )
