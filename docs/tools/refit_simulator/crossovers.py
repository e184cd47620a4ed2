"""Where one way overtakes another, for one simulated refit.

Knows the terms of a prediction and solves for the number at which two of them are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from refit_simulator.predict import Simulation

__all__ = ["DELTA_CHANGED", "Crossovers", "crossovers_of"]

DELTA_CHANGED = 0.03
"""Share of changed elements that the crossover of deltas assumes, where the refit sends all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossovers:
    """Numbers to compare a choice with."""

    replica_size: int
    """Ranks that hold the engine's model once: p."""

    gpus_per_node: int
    """k. Up to p = k whole tensors bring no more into a node than slices do; beyond, p / k times as much."""

    whole_over_slices: float
    """Bytes that whole tensors bring into the neediest node, over those that slices with relays do."""

    pulls_over_relays: float
    """Bytes into the neediest node where each rank pulls for itself, over those with relays: k / p where p < k."""

    tensors_per_rank: float
    """Tensors, or pieces of them, on the busiest rank, at which the CPU takes as long as the bytes."""

    tensors_per_rank_now: int
    """How many there are."""

    delta_nic_gb_s: float
    """Card below which sending the changed elements alone is faster; encoding costs what it costs."""

    delta_changed: float
    """Share of changed elements that this assumes."""


def crossovers_of(simulation: Simulation) -> Crossovers:
    """The crossovers of one refit."""
    workload, floor, costs, traffic = simulation.workload, simulation.floor, simulation.costs, simulation.traffic
    neediest = max(floor.nodes, key=lambda node: node.missing)
    missing = max(1, neediest.missing)
    if traffic is not None:
        tensors, per_tensor = max(traffic.pieces_sent, traffic.pieces_received), costs.piece_s
        over_card = max(traffic.sent, traffic.entered)
    else:
        tensors = simulation.options.num_tensors or workload.num_tensors
        per_tensor = simulation.serial["tensors"] / tensors
        over_card = workload.total_bytes // workload.gpus_per_node
    changed = simulation.options.changed or DELTA_CHANGED
    encoding_s = workload.total_bytes / workload.train.gpus / costs.delta_bytes_s
    saved = max(0.0, 1 - 3 * changed) * over_card / costs.nic_share
    return Crossovers(
        replica_size=workload.engine.replica_size,
        gpus_per_node=workload.gpus_per_node,
        whole_over_slices=workload.total_bytes / missing,
        pulls_over_relays=floor.pulled / missing,
        tensors_per_rank=max(simulation.overlapped.values()) / per_tensor if per_tensor else float("inf"),
        tensors_per_rank_now=tensors,
        delta_nic_gb_s=saved / encoding_s / 1e9,
        delta_changed=changed,
    )
