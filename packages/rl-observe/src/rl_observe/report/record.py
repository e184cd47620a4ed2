"""All that the files of a run say, read so that what is missing or broken is a remark and not an exception.

It does not know the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rl_observe.json_lines import JsonLines, JsonValue, finite_number, read_json_lines
from rl_observe.run_directory import RunDirectory

__all__ = ["Row", "RunRecord", "number", "read_record", "rewards_are_right_or_wrong", "section", "text"]

T = TypeVar("T")
Row = dict[str, JsonValue]
"""One line of a file of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What a run left."""

    path: Path
    """Its folder."""
    recipe: str
    """The resolved recipe; "" where there is none."""
    summary: Mapping[str, object]
    """The figures of the whole run; empty where there are none."""
    versions: Mapping[str, object]
    """What it was made with; empty where that is not known."""
    stages: dict[str, list[Row]]
    """The logged steps of each stage, stages in the order in which they began."""
    samples: list[Row]
    """Held-out answers."""
    spans: list[Row] = field(default_factory=list)
    """What was done when; empty for a run that did not log it."""
    events: list[Row] = field(default_factory=list)
    """Conditions that occurred."""
    refits: list[Row] = field(default_factory=list)
    """Every refit; empty for a run that did not log them one by one."""
    origins: Mapping[str, object] = field(default_factory=dict)
    """Where each key of the recipe was written."""
    remarks: list[str] = field(default_factory=list)
    """What is missing or could not be read, a sentence each."""

    @property
    def rows(self) -> list[Row]:
        """The logged steps of all stages."""
        return [row for rows in self.stages.values() for row in rows]

    @property
    def interrupted(self) -> bool:
        """Whether the run ended early: it says so, or it never came to write its summary."""
        return bool(self.summary.get("interrupted", not self.summary))


def read_record(run: RunDirectory) -> RunRecord:
    """Read the files of a run. Nothing that they hold or lack raises."""
    remarks: list[str] = []
    nothing: Mapping[str, object] = {}
    no_lines = JsonLines([], 0)

    def read(path: Path, reader: Callable[[Path], T], otherwise: T, *, consequence: str) -> T:
        try:
            return reader(path)
        except FileNotFoundError:
            remarks.append(f"{path.name} is missing: {consequence}.")
        except (OSError, ValueError, TypeError) as error:
            remarks.append(f"{path.name} could not be read ({type(error).__name__}): {consequence}.")
        return otherwise

    metrics = read(run.metrics, read_json_lines, no_lines, consequence="there are no curves")
    summary = read(run.summary, _read_object, nothing, consequence="the figures below are those of the log")
    samples = read(run.samples, read_json_lines, no_lines, consequence="there are no answers to compare")
    recipe = read(run.recipe, _read_text, "", consequence="the settings of the run are not known")
    versions = read(run.versions, _read_object, nothing, consequence="what the run was made with is not known")
    # These need not be there: nothing happened, or nobody asked.
    spans, events, refits = (
        read(path, read_json_lines, no_lines, consequence="it is left out") if path.exists() else no_lines
        for path in (run.spans, run.events, run.refits)
    )
    origins = (
        read(run.origins, _read_object, nothing, consequence="it is left out") if run.origins.exists() else nothing
    )
    stages, unplaced = _by_stage(metrics.rows)
    for path, count in (
        (run.metrics, metrics.unreadable + unplaced),
        (run.samples, samples.unreadable),
        (run.spans, spans.unreadable),
        (run.events, events.unreadable),
        (run.refits, refits.unreadable),
    ):
        remarks += _unreadable(path, count)
    return RunRecord(
        path=run.path,
        recipe=recipe,
        summary=summary,
        versions=versions,
        stages=stages,
        samples=samples.rows,
        spans=spans.rows,
        events=events.rows,
        refits=refits.rows,
        origins=origins,
        remarks=remarks,
    )


def number(values: Mapping[str, object], name: str) -> float | None:
    """The finite number of that name, or None."""
    return finite_number(values.get(name))


def text(values: Mapping[str, object], name: str) -> str | None:
    """The string of that name, or None."""
    value = values.get(name)
    return value if isinstance(value, str) else None


def section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The object of that name, or an empty one."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _by_stage(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], int]:
    stages: dict[str, list[Row]] = {}
    placed = 0
    for row in rows:
        stage = text(row, "stage")
        if stage is not None and number(row, "step") is not None:
            stages.setdefault(stage, []).append(row)
            placed += 1
    return stages, len(rows) - placed


def _unreadable(path: Path, count: int) -> list[str]:
    if not count:
        return []
    return [f"{'1 line' if count == 1 else f'{count} lines'} of {path.name} could not be read and had to be left out."]


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_object(path: Path) -> Mapping[str, object]:
    value = json.loads(_read_text(path))
    if not isinstance(value, dict):
        raise TypeError(f"{path.name} holds no JSON object")
    return value


def rewards_are_right_or_wrong(record: RunRecord) -> bool:
    """Whether every sampled reward is 0 or 1, so that one may speak of right answers."""
    rewards = {number(sample, "reward") for sample in record.samples}
    return bool(rewards) and rewards <= {0.0, 1.0}
