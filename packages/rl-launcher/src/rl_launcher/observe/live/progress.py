"""How far a run has come and what it measured last, kept small however long the run is.

It does not know how it is shown: `panel` and `lines` read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rl_launcher.observe.glossary import phase_seconds

__all__ = ["Event", "RunProgress", "StageProgress", "StageTotal", "Trace"]

# A panel is never wider, so that a longer history could not be seen.
_TRACE_CAPACITY = 512


@dataclass(frozen=True, slots=True)
class StageTotal:
    """One stage of a run, as announced before it starts."""

    name: str
    """As in `update(stage, …)`."""

    steps: int
    """Steps that it will take."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"stage {self.name!r} is announced with steps={self.steps}; a stage has at least 1 step")


class Trace:
    """The history of one metric, in at most so many means over equally many steps."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.last = math.nan
        self._pending: list[float] = []
        self._stride = 1

    def append(self, value: float) -> None:
        """Add the next step's value; one that is not finite is passed over."""
        if not math.isfinite(value):
            return
        self.last = value
        self._pending.append(value)
        if len(self._pending) < self._stride:
            return
        self.means.append(sum(self._pending) / self._stride)
        self._pending.clear()
        if len(self.means) == _TRACE_CAPACITY:
            self.means = [(left + right) / 2 for left, right in zip(self.means[::2], self.means[1::2], strict=True)]
            self._stride *= 2

    def resampled(self, width: int) -> list[float]:
        """The whole history as at most `width` means, oldest first."""
        values = self.means or ([self.last] if math.isfinite(self.last) else [])
        if len(values) <= width:
            return values
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


@dataclass(slots=True)
class StageProgress:
    """One stage: how far it is, and what it measured."""

    name: str
    steps: int
    step: int = 0
    started_s: float | None = None
    updated_s: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """The last value of each metric that the stage has logged."""
    first: dict[str, float] = field(default_factory=dict)
    """The first one."""
    headline: str | None = None
    """The metric that `trace` follows."""
    trace: Trace = field(default_factory=Trace)
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase, over the logged steps so far."""

    @property
    def done(self) -> bool:
        """Whether every announced step has been taken."""
        return self.step >= self.steps

    @property
    def elapsed_s(self) -> float:
        """Seconds from the stage's start to its last update."""
        return 0.0 if self.started_s is None else self.updated_s - self.started_s

    @property
    def seconds_per_step(self) -> float:
        """The mean over the stage, evaluations included; NaN before the first step."""
        return self.elapsed_s / self.step if self.step else math.nan

    @property
    def remaining_s(self) -> float:
        """Seconds to the end of the stage at the mean speed so far; NaN before the first step."""
        return self.seconds_per_step * max(0, self.steps - self.step)


@dataclass(frozen=True, slots=True)
class Event:
    """A condition that came up."""

    name: str
    step: int | None
    message: str


class RunProgress:
    """All stages of a run, the announced ones first."""

    def __init__(self, stages: Sequence[StageTotal]) -> None:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages are told apart by their names, which must differ; got {names}")
        self.stages = {stage.name: StageProgress(stage.name, stage.steps) for stage in stages}
        self.current: StageProgress | None = None
        self.last_event: Event | None = None
        self.event_counts: dict[str, int] = {}
        self._last_update_s = 0.0

    def update(self, stage: str, step: int, values: Mapping[str, float], *, now_s: float) -> StageProgress:
        """Take in what one step logged, `now_s` seconds after the run's start.

        A stage starts when the one before it made its last update. One that was not announced is added.
        """
        progress = self.stages.setdefault(stage, StageProgress(stage, max(1, step)))
        if progress.started_s is None:
            progress.started_s = self._last_update_s
        progress.step = max(progress.step, step)
        progress.steps = max(progress.steps, step)
        progress.updated_s = self._last_update_s = now_s
        for name, value in values.items():
            if math.isfinite(value):
                progress.first.setdefault(name, value)
                progress.values[name] = value
        for name, seconds in phase_seconds(values).items():
            progress.phase_s[name] = progress.phase_s.get(name, 0.0) + seconds
        progress.headline = progress.headline or _headline(values)
        if progress.headline is not None and progress.headline in values:
            progress.trace.append(values[progress.headline])
        self.current = progress
        return progress

    def event(self, event: Event) -> None:
        """Take in a condition that came up."""
        self.last_event = event
        self.event_counts[event.name] = self.event_counts.get(event.name, 0) + 1

    def held_out(self, name: str) -> tuple[float, float] | None:
        """The first and the last value of a held-out metric over the whole run, or None where it has none."""
        found = [stage for stage in self.stages.values() if name in stage.values]
        return (found[0].first[name], found[-1].values[name]) if found else None


def _headline(values: Mapping[str, float]) -> str | None:
    return next((name for name in ("reward", "margin", "loss") if name in values), None)
