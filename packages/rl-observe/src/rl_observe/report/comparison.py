"""Several runs on one page: their curves over one another, their figures side by side, and how their recipes differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rl_observe.report.curves import NUM_COLORS, overlay_charts
from rl_observe.report.page import render
from rl_observe.report.record import RunRecord, read_record
from rl_observe.run_directory import RunDirectory, write_text

__all__ = ["compare_runs"]

# Where and when a run was made always differs, and explains nothing.
_ALWAYS_DIFFERENT = frozenset({"run_dir", "collected_at"})


def compare_runs(runs: Sequence[RunDirectory], *, to: Path) -> Path:
    """Write one page about several runs to the file `to`, and return its path.

    Raises:
        ValueError: there are fewer than two runs, one is named twice, or there are more than a page can tell apart.
        RunDirectoryError: the page cannot be written.
    """
    if not 2 <= len(runs) <= 2 * NUM_COLORS:
        raise ValueError(f"{len(runs)} runs cannot be compared on a page; name 2 to {2 * NUM_COLORS} of them")
    twice = [str(run.path) for index, run in enumerate(runs) if run.path in [other.path for other in runs[:index]]]
    if twice:
        raise ValueError(f"a run is compared with itself: {', '.join(twice)}; name each once")
    names = _names([run.path for run in runs])
    records = [read_record(run) for run in runs]
    recipes = _table([_recipe(record) for record in records])
    machines = _table([dict(_flat(record.versions)) for record in records])
    return write_text(
        to,
        render(
            "comparison.html.j2",
            title=f"{len(runs)} runs",
            names=names,
            remarks=[f"{name}: {each}" for name, record in zip(names, records, strict=True) for each in record.remarks],
            overlays=overlay_charts(names, [record.stages for record in records]),
            summaries=_table([dict(_flat(record.summary)) for record in records]),
            recipes=recipes,
            machines=machines,
        ),
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell all of them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _recipe(record: RunRecord) -> dict[str, str]:
    try:
        loaded = yaml.safe_load(record.recipe)
    except yaml.YAMLError:
        record.remarks.append("recipe.yaml could not be read (YAML): its keys are not compared.")
        return {}
    return dict(_flat(loaded)) if isinstance(loaded, dict) else {}


def _flat(data: Mapping[object, object] | Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted names and values of the leaves of nested mappings."""
    leaves: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves += _flat(value, f"{name}.")
        elif name not in _ALWAYS_DIFFERENT:
            word = f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
            leaves.append((name, value if isinstance(value, str) else word))
    return leaves


def _table(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """One row per key, one column per run; a dash where a run lacks the key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, "–") for column in columns] for key in keys}
