"""Where the time went: the share of each phase in a stage, and the steps over wall-clock time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rl_observe.glossary import PHASES, format_duration, format_value, phase_seconds
from rl_observe.log_files import TRAINER, Row
from rl_observe.report.curves import Chart, Curve
from rl_observe.report.record import RunRecord, number, section, text

_MAX_COLUMNS = 150
_KNOWN = {phase.name: phase for phase in PHASES}


def breakdown(record: RunRecord) -> dict[str, Any] | None:
    """For the template: `stages`, and `phases` with their meaning. None if no time was logged.

    A stage has its `name`, its `total` duration, the `shares` of its phases, `cells` (share and mean duration of each
    phase, as text) and a `chart`. If no stage logged phases, there is one for the run, from the summary's shares.
    """
    stages = [found for name, rows in record.stages.items() if (found := _stage(name, rows)) is not None]
    if not stages:
        share = section(record.summary, "phase_share")
        known = {name: value for name in share if (value := number(share, name)) is not None and value > 0}
        if not known:
            return None
        shares = {name: value / sum(known.values()) for name, value in known.items()}
        cells = {name: (format_value(value, "share"), "") for name, value in shares.items()}
        stages = [{"name": "run", "total": "", "shares": shares, "cells": cells, "chart": None}]
    names = dict.fromkeys(name for stage in stages for name in stage["shares"])
    ordered = [*(name for name in _KNOWN if name in names), *(name for name in names if name not in _KNOWN)]
    return {"stages": stages, "phases": {name: _KNOWN[name].meaning if name in _KNOWN else "" for name in ordered}}


def phase_class(name: str) -> str:
    """The CSS class that colors a phase."""
    return f"phase-{name}" if name in _KNOWN else "phase-unknown"


def _stage(name: str, rows: Sequence[Row]) -> dict[str, Any] | None:
    timed = [(step, phase_seconds(row)) for row in rows if (step := number(row, "step")) is not None]
    timed = [(step, seconds) for step, seconds in timed if sum(seconds.values()) > 0]
    if not timed:
        return None
    steps = [step for step, _ in timed]
    phases = {phase for _, seconds in timed for phase in seconds}
    ordered = [*(phase for phase in _KNOWN if phase in phases), *sorted(phases - _KNOWN.keys())]
    layers = {phase: [seconds.get(phase, 0.0) for _, seconds in timed] for phase in ordered}
    total = sum(map(sum, layers.values()))
    # A trainer may log every tenth step only.
    stride = round(statistics.median(high - low for low, high in pairwise([0.0, *steps])))
    per_step = "per step" if stride <= 1 else f"per {stride} steps"
    cells = {}
    for phase, seconds in layers.items():
        if spent := [value for value in seconds if value > 0]:
            how_often = per_step if len(spent) == len(steps) else f"in {len(spent)} step{'s' * (len(spent) > 1)}"
            cells[phase] = (
                format_value(sum(spent) / total, "share"),
                f"{format_duration(statistics.fmean(spent))} {how_often}",
            )
    return {
        "name": name,
        "total": format_duration(total),
        "shares": {phase: sum(seconds) / total for phase, seconds in layers.items()},
        "cells": cells,
        "chart": _chart(f"Time {per_step}, {name}", steps, layers),
    }


def _chart(title: str, steps: Sequence[float], layers: Mapping[str, Sequence[float]]) -> Chart | None:
    """Seconds per step, phases stacked; None if there is nothing to stack."""
    # Phases that most steps go through: an evaluation now and then would be a spike that flattens all the rest.
    usual = [name for name, seconds in layers.items() if sum(map(bool, seconds)) > len(seconds) / 2]
    count = min(len(steps), _MAX_COLUMNS)
    if count < 2 or len(usual) < 2:
        return None
    ends = [round(index * len(steps) / count) for index in range(count + 1)]
    curves = []
    for name in usual:
        columns = [(float(steps[high - 1]), statistics.fmean(layers[name][low:high])) for low, high in pairwise(ends)]
        curves.append(Curve(name, phase_class(name), columns))
    note = "Phases that most steps go through, stacked."
    return Chart(title, note, "seconds", curves, group=title, kind="stacked")


_STEP = "step"
_STEPS_SHOWN = 16
_STEPS_IN_LANES = 8
_MAX_BOXES_PER_LANE = 240


class _Span(NamedTuple):
    name: str
    lane: str
    stage: str
    step: str
    start: float
    end: float
    laid: bool  # True if only its length was measured; its place in the step follows from the order of the phases


def gantts(record: RunRecord) -> list[dict[str, Any]]:
    """The steps of the last stage that logged spans, then the lanes beside the trainer's; empty without spans.

    Each has `title`, `note`, `duration` and `rows` of a label and boxes, placed in percent of the duration.
    """
    spans = [span for row in record.spans if (span := _span(row)) is not None]
    steps = [span for span in spans if span.name == _STEP and span.lane == TRAINER]
    if not steps:
        return []
    stage = steps[-1].stage
    steps = [step for step in steps if step.stage == stage]
    work = [span for span in spans if span.name != _STEP]

    shown = steps
    if len(steps) > _STEPS_SHOWN:
        shown = [steps[round(index * (len(steps) - 1) / (_STEPS_SHOWN - 1))] for index in range(_STEPS_SHOWN)]
    inside = {step: [span for span in _between(work, step.start, step.end) if span.lane == TRAINER] for step in shown}
    durations = [step.end - step.start for step in shown]
    # A first step that compiles would leave the others no room; a longer one is cut off at the edge.
    longest = min(max(durations), 4 * statistics.median(durations))
    rows = [(step.step, [_box(span, step.start, longest) for span in (step, *inside[step])]) for step in shown]
    note = (
        f"{len(shown)} of {len(steps)} steps, evenly chosen." if len(shown) < len(steps) else f"All {len(steps)} steps."
    )
    if any(span.laid for phases in inside.values() for span in phases):
        note += " Durations are measured; within a step, phases are drawn in the order in which they run."
    title = f"Each step of {stage}"
    charts = [{"title": title, "note": note, "duration": format_duration(longest), "rows": rows}]

    if len({span.lane for span in work}) > 1:
        # Steps from the middle: the first ones compile, and near the end nothing is sampled any more.
        first = max(0, (len(steps) - _STEPS_IN_LANES) // 2)
        window = steps[first : first + _STEPS_IN_LANES]
        start, end = window[0].start, window[-1].end
        seen = _between(work, start, end)
        rows = []
        for lane in sorted({span.lane for span in seen}, key=lambda lane: (lane != TRAINER, lane)):
            boxes = [_box(span, start, end - start) for span in seen if span.lane == lane][:_MAX_BOXES_PER_LANE]
            marks = [{**_box(step, start, end - start), "css": "tick"} for step in window[1:] if lane == TRAINER]
            rows.append((lane, [*boxes, *marks]))
        note = f"Steps {window[0].step} to {window[-1].step} of {stage} on one clock, one lane per worker."
        charts.append({"title": "Side by side", "note": note, "duration": format_duration(end - start), "rows": rows})
    return charts


def gantt_legend(charts: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Names and CSS classes of the phases that occur, in the order in which a step goes through them."""
    shown = {box["css"] for chart in charts for _, boxes in chart["rows"] for box in boxes}
    known = {phase.name: phase_class(phase.name) for phase in PHASES if phase_class(phase.name) in shown}
    return known | ({"other work": "phase-unknown"} if "phase-unknown" in shown else {})


def _span(row: Row) -> _Span | None:
    name, lane, start, end = text(row, "name"), text(row, "lane"), number(row, "start_s"), number(row, "end_s")
    if name is None or lane is None or start is None or end is None or end < start:
        return None
    step = number(row, "step")
    step_name = "?" if step is None else f"{step:.0f}"
    return _Span(name, lane, text(row, "stage") or "", step_name, start, end, row.get("laid") is True)


def _between(spans: Sequence[_Span], start: float, end: float) -> list[_Span]:
    return [span for span in spans if span.start < end and span.end > start]


def _box(span: _Span, origin: float, length: float) -> dict[str, Any]:
    length = length or 1.0
    left, right = (min(max(0.0, at - origin), length) for at in (span.start, span.end))
    name, css = (f"step {span.step}", "whole") if span.name == _STEP else (span.name, phase_class(span.name))
    tooltip = f"{name}: {format_duration(span.end - span.start)}, from {format_duration(span.start)} of the run"
    return {
        "css": css,
        "left": f"{100 * left / length:.2f}",
        "width": f"{100 * (right - left) / length:.2f}",
        "tooltip": tooltip,
    }
