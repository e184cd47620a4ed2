"""What a plan asks of each link: bytes and pieces of the busiest rank and node, and the least that any plan could ask.

Knows routes and nodes, and no bandwidths. The bounds hold for every scheme:

    into a node    all distinct bytes that its ranks need and that no rank of it already has, over its cards
    into a rank    all bytes that it needs
    out of all     all distinct bytes that leave their node, once, over all cards of the trainer
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan, plan_refit
from rl_refit.simulate.workload import Workload

__all__ = ["Floor", "Traffic", "floor_of", "traffic_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that no plan can do without."""

    node_in: tuple[tuple[int, int], ...]
    """For each node of the engine: bytes that must enter it, and GPUs that it has."""

    rank_in: int
    """Bytes that the neediest rank of the engine must receive."""

    source_out: int
    """Distinct bytes that must leave the trainer's nodes; 0 where both sides share nodes."""

    rank_bytes: int
    """Weights of the engine's fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the plan asks of the busiest; bytes, and pieces of tensors."""

    sent: int
    """Bytes that the busiest rank of the trainer sends over its card."""

    entered: int
    """Bytes that the busiest rank of the engine receives over its card."""

    relayed: int
    """Bytes that the busiest rank of the engine hands to others of its node, or receives from them."""

    received: int
    """Bytes that the busiest rank of the engine receives in all."""

    pieces_sent: int
    """Boxes of single tensors that the busiest rank of the trainer cuts out."""

    pieces_received: int
    """Boxes of single tensors that the busiest rank of the engine puts in place."""

    ways: int
    """Senders and relays that the busiest rank of the engine hears from, each at least one message."""

    pairs: int
    """Pairs of a sending rank and a rank of the engine that holds what it sent, relayed or not."""


@lru_cache(maxsize=64)
def floor_of(workload: Workload) -> Floor:
    """The bounds of a workload; needs no plan."""
    source, sink = workload.manifests
    nodes = workload.topology.sink_nodes
    sizes = Counter(nodes)
    on_node, on_rank, kept_on_node, kept_on_rank = (Counter[object]() for _ in range(4))
    for held, wanted in zip(source.tensors, sink.tensors, strict=True):
        itemsize = wanted.torch_dtype.itemsize
        for total, held_places, places in _places(wanted.shape, held.layout, wanted.layout, workload):
            pass
    raise AssertionError


@lru_cache(maxsize=16)
def traffic_of(workload: Workload, *, relays: bool = True) -> Traffic:
    """Plan the workload and add up what its routes ask; without relays, every rank of the engine pulls for itself."""
    plan = plan_refit(*workload.manifests, workload.topology if relays else None)
    return _add_up(plan, workload)


def _add_up(plan: RefitPlan, workload: Workload) -> Traffic:
    source_nodes, sink_nodes = workload.topology.source_nodes, workload.topology.sink_nodes
    sent, entered, relayed, received = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    pieces_sent, pieces_received = Counter[int](), Counter[int]()
    ways: dict[int, set[tuple[int, int]]] = {}
    for route in plan.routes:
        first, *others = route.sink_ranks
        tensors = route.region.shape[0]
        pieces_sent[route.source_rank] += tensors
        if source_nodes[route.source_rank] != sink_nodes[first]:
            sent[route.source_rank] += route.nbytes
            entered[first] += route.nbytes
        relayed[first] += route.nbytes * len(others)
        for rank in route.sink_ranks:
            received[rank] += route.nbytes
            pieces_received[rank] += tensors
            ways.setdefault(rank, set()).add((route.source_rank, first))
    pairs = sum(len({source for source, _ in heard}) for heard in ways.values())
    handed = max((received[rank] - entered[rank] for rank in received), default=0)
    return Traffic(
        sent=max(sent.values(), default=0),
        entered=max(entered.values(), default=0),
        relayed=max(handed, max(relayed.values(), default=0)),
        received=max(received.values(), default=0),
        pieces_sent=max(pieces_sent.values(), default=0),
        pieces_received=max(pieces_received.values(), default=0),
        ways=max(map(len, ways.values()), default=0),
        pairs=pairs,
    )


def _bytes_by_node(manifest: Manifest, nodes: tuple[str, ...]) -> tuple[Counter[str], Counter[int]]:
    """Distinct bytes on each node, and bytes on each rank; boxes of one layout are equal or do not overlap."""
    by_node, by_rank = Counter[str](), Counter[int]()
    for meta in manifest.tensors:
        seen = set()
        for rank, boxes in meta.regions().items():
            for box in boxes:
                nbytes = box.numel * meta.torch_dtype.itemsize
                by_rank[rank] += nbytes
                if (nodes[rank], box) not in seen:
                    seen.add((nodes[rank], box))
                    by_node[nodes[rank]] += nbytes
    return by_node, by_rank
