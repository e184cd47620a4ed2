"""What stands behind the figures: the refits, the recipe, the versions.

It shows what the files say and proves nothing of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rl_launcher.observe.figures import format_bytes, format_duration
from rl_launcher.observe.report.markup import Html, element
from rl_launcher.observe.report.record import Row, RunRecord, number, section, text
from rl_launcher.observe.report.series import points

__all__ = ["refit_section", "repeat_section"]


def refit_section(record: RunRecord) -> Html | None:
    """How the policy's weights reached the engine; None for a run without an engine."""
    refit = section(record.summary, "refit")
    logged = [row for row in record.rows if number(row, "refit_bytes") is not None]
    if not refit and not logged:
        return None
    return element(
        "section",
        element("h2", "Weights into the engine"),
        element("p", _how_verified(refit), class_="lead"),
        _facts(_refit_facts(refit, logged)),
        id="refit",
    )


def _how_verified(refit: Mapping[str, object]) -> str:
    start = "Every refit is a transaction: the new weights are staged beside the old ones"
    if "digest" in refit and text(refit, "digest") is None:
        return f"{start}, and serve once all have arrived. Digests were not compared in this run."
    return f"{start}, their digests are compared with the trainer’s, and only then do they answer prompts."


def _refit_facts(refit: Mapping[str, object], logged: Sequence[Row]) -> dict[str, str]:
    seconds = [value for _, value in points(logged, "refit_s") if value is not None]
    last = logged[-1] if logged else {}
    size = _first(number(refit, "bytes"), number(last, "refit_bytes"))
    facts = {
        "refits": _count(_first(number(refit, "count"), float(len(logged)) if logged else None)),
        "last version": _count(_first(number(refit, "version"), number(last, "version"))),
        "tensors": _count(number(refit, "tensors")),
        "bytes each time": None if size is None else format_bytes(size),
        "median time": format_duration(statistics.median(seconds)) if seconds else None,
        "digest of the last": text(refit, "digest"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def repeat_section(record: RunRecord) -> Html | None:
    """The resolved recipe and the versions; None if neither is known."""
    parts = [_recipe(record), _versions(record)]
    if not any(parts):
        return None
    return element("section", element("h2", "To repeat it"), *parts, id="repeat")


def _recipe(record: RunRecord) -> Html | None:
    if not record.recipe:
        return None
    lines = len(record.recipe.splitlines())
    summary = element("summary", "Resolved recipe", element("small", f"recipe.yaml · {lines} lines"))
    return element("details", summary, element("pre", record.recipe, class_="recipe"))


def _versions(record: RunRecord) -> Html | None:
    if not record.versions:
        return None
    rows = [
        element("tr", element("th", name.replace("_", " "), scope="row"), element("td", _word(value)))
        for name, value in record.versions.items()
    ]
    return element("table", element("tbody", *rows), class_="versions")


def _facts(facts: dict[str, str]) -> Html:
    pairs = [
        element("div", element("dt", name), element("dd", value, class_="digest" if "digest" in name else None))
        for name, value in facts.items()
    ]
    return element("dl", *pairs, class_="fact-list")


def _word(value: object) -> str:
    if value is None:
        return "–"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
