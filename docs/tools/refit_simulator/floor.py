"""The least that any scheme must move, whatever it does: what the layouts need and do not have where they need it.

Weights that lie on the GPU, or on the node, that needs them cross no network.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from refit_simulator.workload import Stack, Workload
from rl_refit.layout import Layout, Region

__all__ = ["Floor", "NodeFloor", "floor_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFloor:
    """A node of the engine."""

    gpus: int
    needed: int
    """Distinct bytes that its ranks need."""

    missing: int
    """Those of them that no rank of the trainer on this node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that no scheme can do without."""

    nodes: tuple[NodeFloor, ...]
    rank_missing: int
    """Bytes that the neediest rank of the engine needs and does not have."""

    rank_bytes: int
    """Weights of the engine's fullest rank."""

    rank_tensors: int
    """Tensors of which the engine's busiest rank has any part."""

    pulled: int
    """Bytes that enter the neediest node where each rank pulls for itself."""

    leaves: int
    """Distinct bytes that must leave the trainer; 0 where both sides share nodes."""


@dataclass(slots=True)
class _Place:
    """Bytes of one rank, or of one node."""

    needed: int = 0
    missing: int = 0
    tensors: int = 0


@lru_cache(maxsize=64)
def floor_of(workload: Workload) -> Floor:
    """The bounds of a workload."""
    nodes = workload.topology.sink_nodes
    by_rank: dict[int, _Place] = {rank: _Place() for rank in range(workload.engine.gpus)}
    by_node: dict[str, _Place] = {node: _Place() for node in nodes}
    for stack in workload.stacks:
        held, wanted = _unit(stack, workload, held=True), _unit(stack, workload, held=False)
        size = stack.wanted.shape[0] * stack.wanted.torch_dtype.itemsize
        for rank, boxes in wanted.items():
            _add(by_rank[rank], boxes, held.get(rank, ()), size=size)
            by_rank[rank].tensors += stack.wanted.shape[0] * sum(map(stack.pieces, boxes))
        kept = _on_nodes(held, workload.topology.source_nodes) if workload.colocated else {}
        for node, boxes in _on_nodes(wanted, nodes).items():
            _add(by_node[node], boxes, kept.get(node, ()), size=size)
    sizes = Counter(nodes)
    pulled = Counter[str]()
    for rank, place in by_rank.items():
        pulled[nodes[rank]] += place.missing
    return Floor(
        nodes=tuple(NodeFloor(gpus=sizes[node], needed=at.needed, missing=at.missing) for node, at in by_node.items()),
        rank_missing=max(place.missing for place in by_rank.values()),
        rank_bytes=max(place.needed for place in by_rank.values()),
        rank_tensors=max(place.tensors for place in by_rank.values()),
        pulled=max(pulled.values()),
        leaves=0 if workload.colocated else workload.total_bytes,
    )


def _unit(stack: Stack, workload: Workload, *, held: bool) -> dict[int, tuple[Region, ...]]:
    """Boxes by rank of one tensor of the stack, the trainer's or the engine's; none held where nothing is shared."""
    if held and not workload.colocated:
        return {}
    meta = stack.held if held else stack.wanted
    return _regions(meta.layout, (1, *meta.shape[1:]))


@lru_cache(maxsize=256)
def _regions(layout: Layout, shape: tuple[int, ...]) -> dict[int, tuple[Region, ...]]:
    return layout.regions("", shape)


def _on_nodes(boxes: dict[int, tuple[Region, ...]], nodes: tuple[str, ...]) -> dict[str, tuple[Region, ...]]:
    """Distinct boxes on each node."""
    found: dict[str, dict[Region, None]] = {}
    for rank, held in boxes.items():
        found.setdefault(nodes[rank], {}).update(dict.fromkeys(held))
    return {node: tuple(distinct) for node, distinct in found.items() if distinct}


def _add(place: _Place, wanted: tuple[Region, ...], held: tuple[Region, ...], *, size: int) -> None:
    place.needed += size * sum(box.numel for box in wanted)
    missing = list(wanted)
    for box in held:
        missing = list(itertools.chain.from_iterable(part.minus(box) for part in missing))
    place.missing += size * sum(box.numel for box in missing)
