"""Where the time went: the share of each phase in a stage, and how the seconds of a step changed over the stage."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rl_observe.glossary import PHASES, format_duration, format_value, phase_seconds
from rl_observe.report.curves import Chart, Curve
from rl_observe.report.record import Row, RunRecord, number, section

__all__ = ["breakdown", "phase_class"]

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
