"""Where two runs part: the first step, stage, row and token at which their records differ, and which figures do.

For two runs that should be equal (a resumed run and one that was not interrupted, two backends, before and after a
change of code) the first difference says where to look. For two that should not, the figures say what changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.glossary import finite_number
from rl_observe.log_files import Row, read_metrics
from rl_observe.recorded_steps import RecordedStep, RecordedSteps
from rl_observe.run_directory import RunDirectory

__all__ = ["Comparison", "FigureDifference", "StepDifference", "compare_records", "compare_steps"]

Array: TypeAlias = NDArray[Any]

ORDER = ("groups", "tokens", "flags", "logp_old", "rewards", "advantage", "logp_ref", "logp_proximal", "logp", "loss")
"""Columns in the order in which a step computes them."""

OF_THE_MACHINE = ("time_s", "tokens_per_s", "refit_s", "phase_s", "memory", "collector_s", "mfu")
"""Beginnings of the names of figures that two equal runs do not share."""

NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """The first place at which two recorded steps differ."""

    step: int
    """Of both runs."""

    stage: str
    """The column, or `rollouts` if they have different numbers of them."""

    row: int | None
    """The first rollout that differs."""

    token: int | None
    """Its first token that does."""

    one: float
    """The value in the first run."""

    two: float
    """The value in the second."""

    largest: float
    """The largest difference in this column."""

    run_stage: str | None = None
    """The stage of the run, such as `grpo`, where the runs have several."""

    def __str__(self) -> str:
        """The place in one line."""
        places = [f"{name} {place}" for name in ("row", "token") if (place := getattr(self, name)) is not None]
        of_run = "" if self.run_stage is None else f"{self.run_stage} "
        where = ", ".join([f"{of_run}step {self.step}", self.stage, *places])
        return f"{where}: {self.one:.8g} and {self.two:.8g} (largest difference {self.largest:.3g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """A logged figure that differs."""

    name: str
    """Of the figure."""

    since: int
    """The first step at which it differs."""

    mean: float
    """Mean of second minus first, over the common steps from there on."""

    interval: float
    """Half of the 95 % interval of that mean, from the differences step by step; NaN for one step."""

    run_stage: str | None = None
    """The stage of the run, such as `grpo`, where the runs have several."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.interval

    def __str__(self) -> str:
        """The figure in one line."""
        interval = "" if math.isnan(self.interval) else f" ± {self.interval:.2g}"
        of_run = "" if self.run_stage is None else f"{self.run_stage} "
        return f"{self.name}: {self.mean:+.4g}{interval} since {of_run}step {self.since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two runs do not share."""

    first: StepDifference | None
    """The first difference of recorded steps; None if there is none."""

    steps: list[int]
    """The steps that both have recorded."""

    figures: list[FigureDifference]
    """Logged figures that differ: stage by stage the earliest first, at the same step the clearest."""

    logged: int
    """Steps that both have logged."""

    remarks: list[str] = field(default_factory=list)
    """What could not be compared, since a bundle had no bytes for it."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs; True also if there is nothing to compare."""
        return self.first is None and not self.figures

    def plain(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "equal": self.equal,
            "first_difference": None if self.first is None else asdict(self.first),
            "figures": [asdict(each) for each in self.figures],
            "recorded_steps": self.steps,
            "logged_steps": self.logged,
            "remarks": self.remarks,
        }


def compare_records(one: RunDirectory, two: RunDirectory, *, stage: str | None = None) -> Comparison:
    """Compare the recorded steps and the logs of two runs: of one stage, or of every stage in its order."""
    first, common, remarks, figures, logged = None, list[int](), list[str](), list[FigureDifference](), 0
    left, right = read_metrics(one), read_metrics(two)
    known = [*(row["stage"] for row in left if row.get("stage")), *RecordedSteps(one).stages]
    stages: list[str | None] = [stage] if stage is not None else [*dict.fromkeys(map(str, known))]
    for name in stages or [None]:
        steps_of_one, steps_of_two = RecordedSteps(one, name), RecordedSteps(two, name)
        of_stage = sorted(set(steps_of_one) & set(steps_of_two)) if steps_of_one.stage == steps_of_two.stage else []
        common += of_stage
        several = name if len(stages) > 1 else None
        for number in of_stage if first is None else []:
            both = steps_of_one[number], steps_of_two[number]
            remarks += [f"{each.cut_told} in {each.path}" for each in both if not {*each.cut}.isdisjoint(ORDER)]
            if (found := compare_steps(*both)) is not None:
                first = replace(found, run_stage=several)
                break
        differing, count = _compare_logs(left, right, stage=name)
        figures += [replace(each, run_stage=several) for each in differing]
        logged += count
    return Comparison(first=first, steps=common, figures=figures, logged=logged, remarks=remarks)


def compare_steps(one: RecordedStep, two: RecordedStep) -> StepDifference | None:
    """The first difference of two recorded steps, in the order in which a step computes; None if they are equal."""
    if len(one) != len(two):
        sizes: dict[str, Any] = {
            "one": float(len(one)),
            "two": float(len(two)),
            "largest": float(abs(len(one) - len(two))),
        }
        return StepDifference(step=one.step, stage="rollouts", row=None, token=None, **sizes)
    for name in ORDER:
        if not (one.has(name) and two.has(name)):
            continue
        of_rows = name in {"groups", "rewards"}
        left, right = (step.columns[name] if of_rows else step.padded(name) for step in (one, two))
        if left.ndim == 2 and left.shape != right.shape:  # the longest row has another length
            width = max(left.shape[1], right.shape[1])
            left, right = (_widened(each, width) for each in (left, right))
        both_nan = np.isnan(left) & np.isnan(right) if left.dtype.kind == "f" else np.zeros(left.shape, bool)
        differs = (left != right) & ~both_nan
        if differs.any():
            place = tuple(int(index) for index in np.argwhere(differs)[0])
            gaps = np.abs(left.astype(np.float64) - right.astype(np.float64))[differs]
            return StepDifference(
                step=one.step,
                stage=name,
                row=place[0],
                token=place[1] if len(place) > 1 else None,
                one=float(left[place]),
                two=float(right[place]),
                largest=float(np.nanmax(gaps)) if np.isfinite(gaps).any() else math.inf,
            )
    return None


def _widened(array: Array, width: int) -> Array:
    missing = np.nan if array.dtype.kind == "f" else -1
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=missing)


def _compare_logs(one: Sequence[Row], two: Sequence[Row], *, stage: str | None) -> tuple[list[FigureDifference], int]:
    def by_step(rows: Sequence[Row]) -> dict[int, Row]:
        return {int(float(str(row["step"]))): row for row in rows if stage is None or row.get("stage") == stage}

    left, right = by_step(one), by_step(two)
    common = sorted(set(left) & set(right))
    names = dict.fromkeys(name for step in common for name in left[step] if name in right[step])
    found = []
    for name in names:
        if name in {"stage", "step"} or name.startswith(OF_THE_MACHINE):
            continue
        pairs = [(step, finite_number(left[step].get(name)), finite_number(right[step].get(name))) for step in common]
        differing = [step for step, first, second in pairs if first != second]
        if not differing:
            continue
        since = differing[0]
        gaps = [
            second - first
            for step, first, second in pairs
            if step >= since and first is not None and second is not None
        ]
        if not gaps:
            continue
        half = NORMAL_95 * float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        found.append(FigureDifference(name=name, since=since, mean=float(np.mean(gaps)), interval=half))
    found.sort(key=lambda each: (each.since, -abs(each.mean) / (each.interval or 1e-12)))
    return found, len(common)
