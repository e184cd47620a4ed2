"""Predictions and the calibration as text for people and as plain data for programs.

Every figure comes from a `Simulation` or a `Comparison`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from refit_simulator.calibration import Comparison, Errors, errors_of
from refit_simulator.costs import CALIBRATED
from refit_simulator.crossovers import crossovers_of
from refit_simulator.predict import Simulation
from refit_simulator.published import NOT_PREDICTED

__all__ = ["as_dict", "as_text", "calibration_as_dict", "calibration_as_text"]

_MEANING = {
    "gather": "trainer makes every tensor whole",
    "wire": "network cards: out of the trainer, into a node",
    "nvlink": "inside a node: relays, fan-out",
    "hbm": "passes over memory: pack, unpack, digest",
    "pcie": "out of host memory",
    "tensors": "CPU work for each tensor, or piece of one",
    "messages": "start of each bucket",
    "control": "control plane: calls, metadata, digests, decision",
    "apply": "engine makes staged weights its own",
    "delta": "compare with the base and encode",
}


def as_text(simulation: Simulation) -> str:
    """A prediction, for people."""
    parts = (_head(simulation), _terms(simulation), _busiest(simulation), _crossovers(simulation), _memory(simulation))
    return "\n\n".join("\n".join(part) for part in parts if part)


def as_dict(simulation: Simulation) -> dict[str, Any]:
    """A prediction, for programs; seconds and bytes."""
    workload, hardware = simulation.workload, simulation.hardware
    return {
        "model": workload.model.name,
        "hardware": {name: getattr(hardware, name) for name in hardware.__slots__},
        "train": {"gpus": workload.train.gpus, "layout": workload.train.describe()},
        "engine": {"gpus": workload.engine.gpus, "layout": workload.engine.describe()},
        "colocated": workload.colocated,
        "wire": workload.wire,
        "stacked_experts": workload.stacked_experts,
        "scheme": simulation.scheme.name,
        "options": dataclasses.asdict(simulation.options),
        "tensors": simulation.options.num_tensors or workload.num_tensors,
        "bytes": workload.total_bytes,
        "overlapped_seconds": simulation.overlapped,
        "serial_seconds": simulation.serial,
        "predicted_seconds": simulation.total_seconds,
        "bound_seconds": simulation.bound_seconds,
        "percent_of_bound": simulation.percent_of_bound,
        "dominating": simulation.dominating,
        "traffic": None if simulation.traffic is None else dataclasses.asdict(simulation.traffic),
        "crossovers": dataclasses.asdict(crossovers_of(simulation)),
        "engine_weights_bytes": simulation.floor.rank_bytes,
        "extra_bytes": simulation.extra_bytes,
    }


def _head(simulation: Simulation) -> list[str]:
    workload, hardware = simulation.workload, simulation.hardware
    train, engine = workload.train, workload.engine
    where = "on the same GPUs" if workload.colocated else "on others"
    tensors = simulation.options.num_tensors or workload.num_tensors
    lines = [
        (
            f"{workload.model.name}: {workload.model.parameters / 1e9:,.1f}B parameters, {tensors:,} tensors, "
            f"{workload.total_bytes / 1e9:,.1f} GB as {workload.wire}"
        ),
        (
            f"{train.gpus} trainer GPUs ({train.describe()}) to {engine.gpus} engine GPUs ({engine.describe()}, "
            f"replicas of {engine.replica_size}) {where}"
        ),
        (
            f"{hardware.name}: nodes of {hardware.gpus_per_node}; GB/s a GPU: card {hardware.nic_gb_s:g}, "
            f"NVLink {hardware.nvlink_gb_s:g}, HBM {hardware.hbm_gb_s:g}"
        ),
        f"{simulation.scheme.name}: {simulation.scheme.summary}",
    ]
    if simulation.options.changed is not None:
        lines.append(f"only the {100 * simulation.options.changed:g} % of the elements that changed are sent")
    return lines


def _terms(simulation: Simulation) -> list[str]:
    def rows(terms: dict[str, float]) -> list[str]:
        return [
            f"  {name:<12}{seconds:>10.3f}  {_MEANING[name]}" + "  <- dominates" * (name == simulation.dominating)
            for name, seconds in terms.items()
            if seconds > 0
        ]

    return [
        "seconds that overlap, so that the slowest counts",
        *rows(simulation.overlapped),
        "seconds on top",
        *rows(simulation.serial),
        f"  {'predicted':<12}{simulation.total_seconds:>10.3f}",
        (
            f"  {'bound':<12}{simulation.bound_seconds:>10.3f}  full bandwidth, no software: the prediction reaches "
            f"{simulation.percent_of_bound:.1f} % of it"
        ),
    ]


def _busiest(simulation: Simulation) -> list[str]:
    traffic, floor = simulation.traffic, simulation.floor
    neediest = max(floor.nodes, key=lambda node: node.missing)
    least = f"at least {neediest.missing / 1e9:.1f} GB must enter the neediest node of the engine"
    if traffic is None:
        return [least]
    return [
        least,
        f"busiest trainer rank sends {traffic.sent / 1e9:.1f} GB over its card, in {traffic.pieces_sent:,} pieces",
        (
            f"busiest engine rank receives {traffic.received / 1e9:.1f} GB in {traffic.pieces_received:,} pieces, "
            f"{traffic.entered / 1e9:.1f} GB of it over its card; NVLink moves {traffic.handed / 1e9:.1f} GB of a rank"
        ),
        f"{traffic.routes:,} routes of stacked tensors, {traffic.pairs:,} pairs of sender and receiver",
    ]


def _crossovers(simulation: Simulation) -> list[str]:
    found = crossovers_of(simulation)
    return [
        (
            f"whole tensors bring {found.whole_over_slices:.1f} times the bytes of slices into a node "
            f"(replica p={found.replica_size}, node k={found.gpus_per_node}: alike up to p=k)"
        ),
        f"without relays {found.pulls_over_relays:.1f} times the bytes enter a node",
        (
            f"CPU work outweighs the bytes from {found.tensors_per_rank:,.0f} tensors or pieces a rank; "
            f"there are {found.tensors_per_rank_now:,}"
        ),
        f"deltas of {100 * found.delta_changed:g} % win on cards below {found.delta_nic_gb_s:.2f} GB/s",
    ]


def _memory(simulation: Simulation) -> list[str]:
    weights, extra, capacity = simulation.floor.rank_bytes, simulation.extra_bytes, simulation.hardware.memory_gb
    return [
        (
            f"engine rank: {weights / 1e9:.1f} GB of weights and {extra['engine'] / 1e9:.1f} GB for the refit, of the "
            f"{capacity:g} GB of a GPU"
        ),
        f"trainer rank: {extra['trainer'] / 1e9:.1f} GB for the refit",
    ]


def calibration_as_text(comparisons: Sequence[Comparison]) -> str:
    """The calibration, for people."""
    header = f"{'seconds':<51}{'published':>13}{'predicted':>11}{'ratio':>7}{'bound':>7}  {'dominates':<10}fitted here"
    lines = [header, *map(_row, comparisons), ""]
    for title, errors in calibration_errors(comparisons).items():
        lines.append(
            f"{title}: {errors.rows} rows; off by a factor of {errors.median_factor:.2f} in the median, "
            f"{errors.worst_factor:.2f} at worst ({errors.worst_row}); {errors.within_two} within 2; "
            f"geometric mean of the ratios {errors.bias:.2f}"
        )
    lines += ["", "what publications leave open, and what is assumed instead"]
    lines += [f"  {c.row.name}: {c.row.assumed}" for c in comparisons if c.row.assumed]
    lines += ["", "published, and not predicted"]
    lines += [f"  {row}: {reason}" for row, reason in NOT_PREDICTED]
    return "\n".join(lines)


def calibration_errors(comparisons: Sequence[Comparison]) -> dict[str, Errors]:
    """Error statistics of the rows that constants were fitted on, and of all others."""
    fitted = [comparison for comparison in comparisons if comparison.row.fits]
    held_out = [comparison for comparison in comparisons if not comparison.row.fits]
    return {"fitted": errors_of(fitted), "held out": errors_of(held_out)}


def calibration_as_dict(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The calibration, for programs."""
    return {
        "rows": [
            {
                **dataclasses.asdict(comparison.row),
                "predicted_seconds": comparison.simulation.total_seconds,
                "bound_seconds": comparison.simulation.bound_seconds,
                "dominating": comparison.simulation.dominating,
                "ratio": comparison.ratio,
            }
            for comparison in comparisons
        ],
        "errors": {title: dataclasses.asdict(errors) for title, errors in calibration_errors(comparisons).items()},
        "costs": dataclasses.asdict(CALIBRATED),
        "not_predicted": dict(NOT_PREDICTED),
    }


def _row(comparison: Comparison) -> str:
    row, simulation = comparison.row, comparison.simulation
    low, high = row.seconds
    published = f"{low:g}" if low == high else f"{low:g}–{high:g}"
    return (
        f"{row.name:<51}{published:>13}{simulation.total_seconds:>11.2f}{comparison.ratio:>7.2f}"
        f"{simulation.bound_seconds:>7.2f}  {simulation.dominating:<10}{row.fits}"
    ).rstrip()
