"""The simulator against what others measured: prediction beside publication beside bound, and how far off it is.

One set of constants for all rows. Errors are ratios, prediction over publication: 1 is right, 2 and 0.5 are equally
wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from refit_simulator.costs import CALIBRATED, Costs
from refit_simulator.hardware import HARDWARE
from refit_simulator.models import MODELS
from refit_simulator.parallelism import Parallelism
from refit_simulator.predict import Options, Simulation, predict
from refit_simulator.published import ROWS, PublishedRow
from refit_simulator.schemes import SCHEMES
from refit_simulator.workload import Workload

__all__ = ["Comparison", "Errors", "compare", "compare_row", "errors_of"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published row and its prediction."""

    row: PublishedRow
    simulation: Simulation

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.simulation.total_seconds / self.row.published_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far off a set of predictions is."""

    rows: int
    median_factor: float
    """Half of the rows are off by less than this factor, either way."""

    worst_factor: float
    worst_row: str
    bias: float
    """Geometric mean of the ratios: below 1 the simulator is too fast."""

    within_two: int
    """Rows that are off by less than a factor of two."""


def compare(*, costs: Costs = CALIBRATED) -> tuple[Comparison, ...]:
    """Predict every published row."""
    return tuple(compare_row(row, costs=costs) for row in ROWS)


def compare_row(row: PublishedRow, *, costs: Costs = CALIBRATED) -> Comparison:
    """Predict one published row."""
    hardware = HARDWARE[row.hardware]
    workload = Workload(
        model=MODELS[row.model],
        train=Parallelism.parse(row.train[1], gpus=row.train[0]),
        engine=Parallelism.parse(row.engine[1], gpus=row.engine[0]),
        gpus_per_node=hardware.gpus_per_node,
        colocated=row.colocated,
        wire=row.wire,
    )
    options = Options(bucket_bytes=round(row.bucket_gb * 1e9), num_tensors=row.num_tensors)
    return Comparison(row, predict(workload, SCHEMES[row.scheme], hardware, costs=costs, options=options))


def errors_of(comparisons: Sequence[Comparison]) -> Errors:
    """The statistics of some comparisons, which must not be none."""
    logs = [math.log(comparison.ratio) for comparison in comparisons]
    worst = max(comparisons, key=lambda comparison: abs(math.log(comparison.ratio)))
    return Errors(
        rows=len(logs),
        median_factor=math.exp(statistics.median(map(abs, logs))),
        worst_factor=math.exp(max(map(abs, logs))),
        worst_row=worst.row.name,
        bias=math.exp(statistics.fmean(logs)),
        within_two=sum(abs(log) < math.log(2) for log in logs),
    )
