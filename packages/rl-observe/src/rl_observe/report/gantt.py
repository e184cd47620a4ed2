"""Steps over wall time: a bar a step with its phases in their places, and a lane for each that worked beside others.

It does not know what the phases do. Bars are HTML boxes placed by shares of the axis, so that they print and stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_observe.glossary import PHASES
from rl_observe.log_files import TRAINER
from rl_observe.number_format import format_duration
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, text
from rl_observe.report.scale import Scale, linear_scale

__all__ = ["gantt_section"]

_STEP = "step"
_STEPS_DRAWN = 24
_STEPS_IN_LANES = 8
_BOXES_A_LANE = 240
_KNOWN = frozenset(phase.name for phase in PHASES)


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    lane: str
    stage: str
    step: float | None
    start: float
    end: float
    laid: bool


def gantt_section(record: RunRecord) -> Html | None:
    """Show the steps of the last stage that logged spans; None if none did."""
    spans = [span for row in record.spans if (span := _span(row)) is not None]
    steps = [span for span in spans if span.name == _STEP and span.lane == TRAINER]
    if not steps:
        return None
    stage = steps[-1].stage
    steps = [step for step in steps if step.stage == stage]
    work = [span for span in spans if span.name != _STEP]
    drawn = _evenly(steps, _STEPS_DRAWN)
    parts = [_chart(f"Each step of {stage}", _note(drawn, work, total=len(steps)), _step_rows(drawn, work))]
    if len({span.lane for span in work}) > 1:
        window = _window(steps)
        note = f"Steps {_name(window[0])} to {_name(window[-1])} of {stage} on one clock: who worked while others did."
        parts.append(_chart("Side by side", note, _lane_rows(window, work)))
    return element(
        "section",
        element("h2", "Step by step"),
        element("p", "When each step did what, in wall-clock seconds.", class_="lead"),
        *parts,
        _legend({span.name for span in work if span.end > steps[0].start}),
        id="gantt",
    )


def _span(row: Row) -> _Span | None:
    name, lane, start, end = text(row, "name"), text(row, "lane"), number(row, "start_s"), number(row, "end_s")
    if name is None or lane is None or start is None or end is None or end < start:
        return None
    return _Span(name, lane, text(row, "stage") or "", number(row, "step"), start, end, row.get("laid") is True)


def _evenly(steps: Sequence[_Span], count: int) -> list[_Span]:
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _window(steps: Sequence[_Span]) -> Sequence[_Span]:
    """Steps in the middle: the first ones compile, and at the end nobody samples any more."""
    start = max(0, (len(steps) - _STEPS_IN_LANES) // 2)
    return steps[start : start + _STEPS_IN_LANES]


def _note(drawn: Sequence[_Span], work: Sequence[_Span], *, total: int) -> str:
    some = f"{len(drawn)} of {total} steps, evenly chosen." if len(drawn) < total else f"All {total} steps."
    laid = any(span.laid for step in drawn for span in _inside(work, step) if span.lane == TRAINER)
    order = " Lengths are measured; within a step, phases are put in the order in which it goes through them."
    return some + (order if laid else "")


def _step_rows(drawn: Sequence[_Span], work: Sequence[_Span]) -> tuple[Scale, list[Html]]:
    scale = linear_scale([0.0, *(step.end - step.start for step in drawn)], tight=True)
    rows = []
    for step in drawn:
        boxes = [_box(span, since=step.start, scale=scale) for span in _inside(work, step) if span.lane == TRAINER]
        rows.append(_row(_name(step), [_whole(step, scale), *boxes]))
    return scale, rows


def _lane_rows(window: Sequence[_Span], work: Sequence[_Span]) -> tuple[Scale, list[Html]]:
    start, end = window[0].start, window[-1].end
    scale = linear_scale([0.0, end - start], tight=True)
    seen = [span for span in work if span.end > start and span.start < end]
    lanes = sorted({span.lane for span in seen}, key=lambda lane: (lane != TRAINER, lane))
    rows = []
    for lane in lanes:
        inside = [span for span in seen if span.lane == lane][:_BOXES_A_LANE]
        boxes = [_box(span, since=start, scale=scale, until=end) for span in inside]
        steps = [_mark(step, since=start, scale=scale) for step in window[1:]] if lane == TRAINER else []
        rows.append(_row(lane, [*boxes, *steps]))
    return scale, rows


def _inside(work: Sequence[_Span], step: _Span) -> list[_Span]:
    return [span for span in work if span.start < step.end and span.end > step.start]


def _box(span: _Span, *, since: float, scale: Scale, until: float | None = None) -> Html:
    left = scale.place(max(0.0, span.start - since))
    width = scale.place((span.end if until is None else min(span.end, until)) - since) - left
    known = span.name if span.name in _KNOWN else "unknown"
    title = f"{span.name}: {format_duration(span.end - span.start)}, from {format_duration(span.start)} of the run"
    return element("i", class_=f"phase-{known}", style=_placed(left, width), title=title)


def _whole(step: _Span, scale: Scale) -> Html:
    title = f"step {_name(step)}: {format_duration(step.end - step.start)}"
    return element("i", class_="whole", style=_placed(0.0, scale.place(step.end - step.start)), title=title)


def _mark(step: _Span, *, since: float, scale: Scale) -> Html:
    return element("i", class_="tick", style=f"left:{100 * scale.place(step.start - since):.2f}%")


def _placed(left: float, width: float) -> str:
    return f"left:{100 * left:.2f}%;width:{100 * max(0.0, width):.2f}%"


def _row(label: str, boxes: Sequence[Html]) -> Html:
    return element("div", element("span", label), element("div", *boxes, class_="track"), class_="gantt-row")


def _chart(title: str, note: str, rows: tuple[Scale, list[Html]]) -> Html:
    scale, bars = rows
    ticks = [
        element("span", format_duration(tick) if tick else "0", style=f"left:{100 * scale.place(tick):.2f}%")
        for tick in scale.ticks
    ]
    axis = element("div", element("span", ""), element("div", *ticks, class_="x-axis"), class_="gantt-row")
    caption = element("figcaption", element("h4", title), element("p", note, class_="note"))
    return element("figure", caption, element("div", *bars, axis, class_="gantt"), class_="chart wide gantt-chart")


def _legend(names: set[str]) -> Html:
    known = [phase.name for phase in PHASES if phase.name in names]
    others = sorted(names - _KNOWN)
    items = [element("li", element("i", class_=f"key phase-{name}"), name) for name in known]
    items += [element("li", element("i", class_="key phase-unknown"), name) for name in others]
    return element("ul", *items, class_="legend")


def _name(step: _Span) -> str:
    return "?" if step.step is None else f"{step.step:.0f}"
