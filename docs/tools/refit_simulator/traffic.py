"""What a plan asks of each link: bytes and pieces of the busiest rank and node.

Knows routes and nodes, and no bandwidths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from refit_simulator.workload import Workload
from rl_refit.plan import RefitPlan, plan_refit

__all__ = ["Traffic", "traffic_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the plan asks of the busiest; bytes, and pieces of tensors."""

    sent: int
    """Bytes that the busiest rank of the trainer sends over its card."""

    entered: int
    """Bytes that the busiest rank of the engine receives over its card."""

    handed: int
    """Bytes that the busiest rank of the engine receives from its node, or hands to others of it."""

    received: int
    """Bytes that the busiest rank of the engine receives in all."""

    pieces_sent: int
    """Boxes of single tensors that the busiest rank of the trainer cuts out."""

    pieces_received: int
    """Boxes of single tensors that the busiest rank of the engine puts in place."""

    ways: int
    """Pairs of a sender and a relay that the busiest rank of the engine hears from, each at least one message."""

    pairs: int
    """Pairs of a rank of the trainer and a rank of the engine that gets something of it, relayed or not, in all."""

    routes: int
    """Routes of the plan."""


@lru_cache(maxsize=64)
def traffic_of(workload: Workload, *, relays: bool = True) -> Traffic:
    """Plan the workload and add up what its routes ask; without relays, every rank of the engine pulls for itself."""
    plan = plan_refit(*workload.manifests, workload.topology if relays else None)
    return _add_up(plan, workload).busiest(len(plan.routes))


@dataclass(slots=True)
class _Loads:
    """Bytes and pieces by rank."""

    sent: Counter[int] = field(default_factory=Counter)
    entered: Counter[int] = field(default_factory=Counter)
    relayed: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    pieces_sent: Counter[int] = field(default_factory=Counter)
    pieces_received: Counter[int] = field(default_factory=Counter)
    ways: dict[int, set[tuple[int, int]]] = field(default_factory=dict)

    def busiest(self, routes: int) -> Traffic:
        inside = (self.received[rank] - self.entered[rank] for rank in self.received)
        return Traffic(
            sent=max(self.sent.values(), default=0),
            entered=max(self.entered.values(), default=0),
            handed=max(*inside, *self.relayed.values(), 0, 0),
            received=max(self.received.values(), default=0),
            pieces_sent=max(self.pieces_sent.values(), default=0),
            pieces_received=max(self.pieces_received.values(), default=0),
            ways=max(map(len, self.ways.values()), default=0),
            pairs=sum(len({source for source, _ in heard}) for heard in self.ways.values()),
            routes=routes,
        )


def _add_up(plan: RefitPlan, workload: Workload) -> _Loads:
    source_nodes, sink_nodes = workload.topology.source_nodes, workload.topology.sink_nodes
    stacks = {stack.held.name: stack for stack in workload.stacks}
    loads = _Loads()
    for route in plan.routes:
        source, (first, *others), nbytes = route.source_rank, route.sink_ranks, route.nbytes
        pieces = stacks[route.region.name].pieces(route.region)
        loads.pieces_sent[source] += pieces
        if source_nodes[source] != sink_nodes[first]:
            loads.sent[source] += nbytes
            loads.entered[first] += nbytes
        loads.relayed[first] += nbytes * len(others)
        for rank in route.sink_ranks:
            loads.received[rank] += nbytes
            loads.pieces_received[rank] += pieces
            loads.ways.setdefault(rank, set()).add((source, first))
    return loads
