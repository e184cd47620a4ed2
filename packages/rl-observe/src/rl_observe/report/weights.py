"""How the policy's weights reached the engine: every refit over the run, and the figures of the last ones.

It shows what was reported and verifies nothing of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_bytes, format_duration
from rl_observe.report.chart import Chart, Curve, draw
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, section, text
from rl_observe.report.series import Points, points

__all__ = ["fact_list", "refit_section"]

_LAST_SHOWN = 8
_ENOUGH_FOR_A_CURVE = 3


def refit_section(record: RunRecord) -> Html | None:
    """How the policy's weights reached the engine; None for a run without an engine."""
    refit = section(record.summary, "refit")
    logged = [row for row in record.rows if number(row, "refit_bytes") is not None]
    if not refit and not logged and not record.refits:
        return None
    return element(
        "section",
        element("h2", "Weights into the engine"),
        element("p", _how_verified(refit, record.refits), class_="lead"),
        fact_list(_facts(refit, logged, record.refits)),
        _curve(record.refits),
        _table(record.refits),
        id="refit",
    )


def _how_verified(refit: Mapping[str, object], refits: Sequence[Row]) -> str:
    start = "Every refit is a transaction: the new weights are staged beside the old ones"
    unverified = [one for one in refits if not _is_verified(one)]
    if ("digest" in refit and text(refit, "digest") is None) or (refits and len(unverified) == len(refits)):
        return f"{start}, and serve once all have arrived. Digests were not compared in this run."
    sure = f"{start}, their digests are compared with the trainer’s, and only then do they answer prompts."
    return f"{sure} In {len(unverified)} of {len(refits)} they were not compared." if unverified else sure


def _facts(refit: Mapping[str, object], logged: Sequence[Row], refits: Sequence[Row]) -> dict[str, str]:
    seconds = [value for _, value in points(logged, "refit_s") if value is not None] or _all_seconds(refits)
    last = logged[-1] if logged else {}
    last_refit = refits[-1] if refits else {}
    size = _first(number(refit, "bytes"), number(last, "refit_bytes"), number(last_refit, "bytes"))
    count = float(len(refits) or len(logged))
    facts = {
        "refits": _count(_first(number(refit, "count"), count or None)),
        "verified": f"{sum(map(_is_verified, refits))} of {len(refits)}" if refits else None,
        "last version": _count(
            _first(number(refit, "version"), number(last, "version"), number(last_refit, "version"))
        ),
        "tensors": _count(_first(number(refit, "tensors"), number(last_refit, "tensors"))),
        "bytes each time": None if size is None else format_bytes(size),
        "median time": format_duration(statistics.median(seconds)) if seconds else None,
        "digest of the last": text(refit, "digest") or text(last_refit, "digest"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _curve(refits: Sequence[Row]) -> Html | None:
    timed: Points = [(version, _seconds(one)) for one in refits if (version := number(one, "version")) is not None]
    if sum(value is not None for _, value in timed) < _ENOUGH_FOR_A_CURVE:
        return None
    chart = Chart(
        title="Seconds of each refit",
        note="Over the version that was brought in, verification included.",
        unit="seconds",
        curves=[Curve(label="refit time", role="main", points=timed)],
    )
    return element("div", draw(chart), class_="charts")


def _table(refits: Sequence[Row]) -> Html | None:
    if not refits:
        return None
    heads = ("version", "moved", "took", "verified", "digest")
    rows = [
        element(
            "tr",
            element("th", _count(number(one, "version")) or "–", scope="row"),
            element("td", _or_dash(number(one, "bytes"), format_bytes)),
            element("td", _or_dash(_seconds(one), format_duration)),
            element("td", ("✓ " if _is_verified(one) else "✗ ") + (text(one, "verified") or "not known")),
            element("td", element("code", (text(one, "digest") or "–")[:16])),
        )
        for one in refits[-_LAST_SHOWN:]
    ]
    note = f"The last {len(rows)} of {len(refits)}; refits.jsonl has all." if len(rows) < len(refits) else None
    return element(
        "div",
        element(
            "table",
            element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
            element("tbody", *rows),
            class_="refits",
        ),
        element("p", note, class_="note") if note else None,
    )


def fact_list(facts: Mapping[str, str]) -> Html:
    """Names and values side by side; digests take a line of their own."""
    pairs = [
        element("div", element("dt", name), element("dd", value, class_="digest" if "digest" in name else None))
        for name, value in facts.items()
    ]
    return element("dl", *pairs, class_="fact-list")


def _is_verified(refit: Row) -> bool:
    return text(refit, "digest") is not None and text(refit, "verified") != "nothing"


def _seconds(refit: Row) -> float | None:
    seconds = section(refit, "seconds")
    known = [value for name in seconds if (value := finite_number(seconds[name])) is not None]
    return sum(known) if known else None


def _all_seconds(refits: Sequence[Row]) -> list[float]:
    return [value for one in refits if (value := _seconds(one)) is not None]


def _or_dash(value: float | None, written: object) -> str:
    return "–" if value is None or not callable(written) else str(written(value))


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
