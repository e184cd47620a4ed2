"""Several runs on one page: their curves over one another, their figures side by side, and what differs between them.

It knows how to compare; `overlays` knows what is drawn. A difference of the recipes is shown with every value, and what
the runs have in common is not shown at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rl_observe.report.document import document, remarks_aside, write_page
from rl_observe.report.markup import Html, element
from rl_observe.report.overlays import NUM_ROLES, overlay_sections
from rl_observe.report.record import RunRecord, read_record
from rl_observe.run_directory import RunDirectory

__all__ = ["compare_runs"]

_ABSENT = "–"
# Where the runs lie and when they were made differs always, and explains nothing.
_ALWAYS_DIFFERENT = frozenset({"run_dir", "collected_at"})

_Columns = tuple[Sequence[str], Sequence[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class _Named:
    """A run with the name that tells it from the others."""

    name: str
    record: RunRecord


def compare_runs(runs: Sequence[RunDirectory], *, to: Path) -> Path:
    """Write one page about several runs to the file `to`, and return its path.

    Raises:
        ValueError: there are fewer than two runs, or one is named twice, or more than a page can tell apart.
        RunDirectoryError: the page cannot be written.
    """
    if not 2 <= len(runs) <= 2 * NUM_ROLES:
        raise ValueError(f"{len(runs)} runs cannot be compared on a page; name 2 to {2 * NUM_ROLES} of them")
    twice = [str(run.path) for index, run in enumerate(runs) if run.path in [other.path for other in runs[:index]]]
    if twice:
        raise ValueError(f"a run is compared with itself: {', '.join(twice)}; name each once")
    named = [_Named(name, read_record(run)) for name, run in zip(_names([run.path for run in runs]), runs, strict=True)]
    return write_page(to, document(f"{len(runs)} runs · comparison", _sections(named)))


def _names(paths: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell all of them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _sections(runs: Sequence[_Named]) -> list[Html]:
    names = [run.name for run in runs]
    recipes = [_recipe(run.record) for run in runs]
    versions = [dict(_flat(run.record.versions)) for run in runs]
    summaries = [dict(_flat(run.record.summary)) for run in runs]
    sections = [
        element(
            "header",
            element("p", "Comparison of runs", class_="eyebrow"),
            element("h1", f"{len(runs)} runs"),
            element("p", " · ".join(names), class_="facts"),
        ),
        remarks_aside([f"{run.name}: {remark}" for run in runs for remark in run.record.remarks]),
        *overlay_sections(names, [run.record.stages for run in runs]),
        _table("What came of them", "The summaries of the runs, side by side.", (names, summaries), id_="summaries"),
        _table(
            "What differs between the recipes",
            _count(recipes, what="keys of the recipes"),
            (names, _differences(recipes)),
            id_="recipes",
        ),
        _table(
            "What differs between the machines",
            _count(versions, what="versions and figures of the machines"),
            (names, _differences(versions)),
            id_="machines",
        ),
        element("footer", "Made by rl-launcher from the files of the runs."),
    ]
    return [section for section in sections if section is not None]


def _recipe(record: RunRecord) -> dict[str, str]:
    try:
        loaded = yaml.safe_load(record.recipe)
    except yaml.YAMLError:
        record.remarks.append("recipe.yaml could not be read (YAML): its keys are not compared.")
        return {}
    return dict(_flat(loaded)) if isinstance(loaded, dict) else {}


def _flat(data: Mapping[object, object] | Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    leaves: list[tuple[str, str]] = []
    for name, value in data.items():
        if isinstance(value, dict) and value:
            leaves += _flat(value, f"{prefix}{name}.")
        elif f"{prefix}{name}" not in _ALWAYS_DIFFERENT:
            leaves.append((f"{prefix}{name}", _word(value)))
    return leaves


def _word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _differences(columns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    keys = {key: None for column in columns for key in column}
    differing = [key for key in keys if len({column.get(key) for column in columns}) > 1]
    return [{key: column[key] for key in differing if key in column} for column in columns]


def _count(columns: Sequence[Mapping[str, str]], *, what: str) -> str:
    keys = {key for column in columns for key in column}
    same = sum(len({column.get(key) for column in columns}) == 1 for key in keys)
    return f"{len(keys) - same} of {len(keys)} {what}; the other {same} are the same everywhere."


def _table(
    title: str, note: str, content: tuple[Sequence[str], Sequence[Mapping[str, str]]], *, id_: str
) -> Html | None:
    names, columns = content
    keys = {key: None for column in columns for key in column}
    if not keys and id_ == "summaries":
        return None
    heads = [element("th", name, scope="col") for name in ("", *names)]
    rows = [
        element("tr", element("th", key, scope="row"), *(element("td", column.get(key, _ABSENT)) for column in columns))
        for key in keys
    ]
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="runs")
    return element(
        "section",
        element("h2", title),
        element("p", note, class_="lead"),
        element("div", table, class_="scroll") if keys else None,
        id=id_,
    )
