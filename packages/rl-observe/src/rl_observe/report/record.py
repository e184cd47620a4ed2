"""Read the files of a run for the report. A missing or broken file becomes a remark on the page, never an exception."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rl_observe.glossary import finite_number
from rl_observe.log_files import Row, read_json_lines
from rl_observe.run_directory import RunDirectory

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that the files of a run hold. What is missing is empty, and `remarks` says so."""

    path: Path
    recipe: str
    origins: Mapping[str, object]  # where each key of the recipe was set
    summary: Mapping[str, object]
    versions: Mapping[str, object]
    prediction: Mapping[str, object]  # what was expected when the run started
    stages: dict[str, list[Row]]  # logged steps by stage, in the order in which the stages started
    samples: list[Row]
    spans: list[Row]
    events: list[Row]
    refits: list[Row]
    remarks: list[str]  # what is missing or unreadable, one sentence each

    @property
    def rows(self) -> list[Row]:
        """The logged steps of all stages."""
        return [row for rows in self.stages.values() for row in rows]

    @property
    def interrupted(self) -> bool:
        """True if the run says that it ended early, or never wrote its summary."""
        return bool(self.summary.get("interrupted", not self.summary))

    @property
    def rewards_are_right_or_wrong(self) -> bool:
        """True if every sampled reward is 0 or 1, so that the page may speak of right responses."""
        rewards = {number(sample, "reward") for sample in self.samples}
        return bool(rewards) and rewards <= {0.0, 1.0}


def read_record(run: RunDirectory) -> RunRecord:
    """Read the files of a run. Nothing that they contain or lack raises."""
    remarks: list[str] = []

    def read(path: Path, reader: Callable[[Path], T], otherwise: T, *, lost: str | None) -> T:
        # Without `lost` the file is optional: it exists only if something happened.
        try:
            return reader(path)
        except FileNotFoundError:
            remarks.extend([f"{path.name} is missing: {lost}."] if lost else [])
        except (OSError, ValueError, TypeError) as error:
            remarks.append(f"{path.name} could not be read ({type(error).__name__}): {lost or 'it is left out'}.")
        return otherwise

    def read_object(path: Path) -> Mapping[str, object]:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError
        return value

    def read_rows(path: Path, lost: str | None = None, is_valid: Callable[[Row], bool] = bool) -> list[Row]:
        nothing: tuple[list[Row], int] = [], 0
        found, unreadable = read(path, read_json_lines, nothing, lost=lost)
        rows = [row for row in found if is_valid(row)]
        if bad := unreadable + len(found) - len(rows):
            remarks.append(f"{f'{bad} lines' if bad > 1 else '1 line'} of {path.name} could not be read: left out.")
        return rows

    stages: dict[str, list[Row]] = {}
    steps = read_rows(
        run.metrics,
        "there are no curves",
        lambda row: text(row, "stage") is not None and number(row, "step") is not None,
    )
    for row in steps:
        stages.setdefault(str(row["stage"]), []).append(row)
    nothing: Mapping[str, object] = {}
    return RunRecord(
        path=run.path,
        stages=stages,
        summary=read(run.summary, read_object, nothing, lost="the figures come from the log instead"),
        samples=read_rows(run.samples, "there are no responses to compare"),
        recipe=read(run.recipe, lambda path: path.read_text(encoding="utf-8"), "", lost="the settings are unknown"),
        versions=read(run.versions, read_object, nothing, lost="machine and packages are unknown"),
        prediction=read(run.prediction, read_object, nothing, lost=None),
        origins=read(run.origins, read_object, nothing, lost=None),
        spans=read_rows(run.spans),
        events=read_rows(run.events),
        refits=read_rows(run.refits),
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
