"""What came up in a run and what was done about it. It does not judge the reactions."""

from __future__ import annotations

import re

from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, text

__all__ = ["conditions_section"]

# A run that goes wrong a thousand times is told by its first and its last.
_MOST_SHOWN = 40


def conditions_section(record: RunRecord) -> Html | None:
    """The events of the run in their order; None where nothing happened."""
    if not record.events:
        return None
    shown = record.events
    if len(shown) > _MOST_SHOWN:
        shown = [*shown[: _MOST_SHOWN // 2], *shown[-_MOST_SHOWN // 2 :]]
    heads = ("when", "what", "what happened", "what was done")
    return element(
        "section",
        element("h2", "What came up"),
        element("p", _describe(record.events, num_shown=len(shown)), class_="lead"),
        element(
            "table",
            element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
            element("tbody", *map(_row, shown)),
            class_="conditions",
        ),
        id="conditions",
    )


def _describe(events: list[Row], *, num_shown: int) -> str:
    counts: dict[str, int] = {}
    for event in events:
        name = text(event, "name") or "event"
        counts[name] = counts.get(name, 0) + 1
    listed = ", ".join(f"{name} × {count}" if count > 1 else name for name, count in counts.items())
    left_out = (
        "" if num_shown == len(events) else f" The first and last {num_shown // 2} are shown; events.jsonl has all."
    )
    return f"Conditions that the run noticed by itself: {listed}.{left_out}"


def _row(event: Row) -> Html:
    step, moment = number(event, "step"), text(event, "time") or ""
    place = " ".join(word for word in (text(event, "stage"), None if step is None else f"step {step:.0f}") if word)
    clock = re.sub(r"^\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d).*", r"\1 UTC", moment)
    return element(
        "tr",
        element("td", place or None, element("small", clock)),
        element("th", text(event, "name") or "event", scope="row"),
        element("td", text(event, "message") or "–"),
        element("td", text(event, "reaction") or "–"),
    )
