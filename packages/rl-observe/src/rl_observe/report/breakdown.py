"""Where the time went: each phase's share of a stage, and how a step's time was divided as the stage went on.

It does not judge the shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl_observe.glossary import PHASES, phase_seconds
from rl_observe.number_format import format_duration, format_percent
from rl_observe.report.chart import Chart, frame
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, section
from rl_observe.report.scale import Scale, linear_scale

__all__ = ["breakdown_section"]

_COLUMNS_DRAWN = 150
_SIZE = 1000
_KNOWN = {phase.name: phase for phase in PHASES}

Layers = dict[str, list[float]]
"""Seconds of each phase, one entry a step."""


@dataclass(frozen=True, slots=True)
class _Stage:
    name: str
    layers: Layers
    steps: list[float]

    @property
    def totals(self) -> dict[str, float]:
        return {phase: sum(seconds) for phase, seconds in self.layers.items()}

    @property
    def stride(self) -> int:
        """Optimizer steps from one logged step to the next."""
        return round(statistics.median(high - low for low, high in pairwise([0.0, *self.steps])))


def breakdown_section(record: RunRecord) -> Html | None:
    """Show the phases of every stage that logged them; from the summary alone if none did; None without either."""
    stages = [stage for name, rows in record.stages.items() if (stage := _stage(name, rows)) is not None]
    parts = _measured(stages) if stages else _summarized(record)
    if not parts:
        return None
    return element(
        "section",
        element("h2", "Where the time went"),
        element("p", "Wall-clock time of the logged steps, by what each step was doing.", class_="lead"),
        *parts,
        id="time",
    )


def _stage(name: str, rows: Sequence[Row]) -> _Stage | None:
    timed = [(step, phase_seconds(row)) for row in rows if (step := number(row, "step")) is not None]
    timed = [(step, seconds) for step, seconds in timed if sum(seconds.values()) > 0]
    if not timed:
        return None
    seen = {phase for _, seconds in timed for phase in seconds}
    names = [*(phase for phase in _KNOWN if phase in seen), *sorted(seen - _KNOWN.keys())]
    layers = {phase: [seconds.get(phase, 0.0) for _, seconds in timed] for phase in names}
    return _Stage(name, layers, [step for step, _ in timed])


def _measured(stages: Sequence[_Stage]) -> list[Html]:
    bars = [_bar(stage.name, format_duration(sum(stage.totals.values())), stage.totals) for stage in stages]
    charts = [chart for stage in stages if (chart := _area_chart(stage)) is not None]
    return [
        element("div", *bars, class_="bars"),
        _table(stages),
        *([element("div", *charts, class_="charts")] if charts else []),
    ]


def _summarized(record: RunRecord) -> list[Html]:
    share = section(record.summary, "phase_share")
    totals = {name: value for name in share if (value := number(share, name)) is not None and value > 0}
    return [element("div", _bar("run", "", totals), class_="bars")] if totals else []


def _bar(label: str, note: str, totals: Mapping[str, float]) -> Html:
    total = sum(totals.values())
    parts = []
    for name, seconds in totals.items():
        words = element("b", f"{name} {100 * seconds / total:.0f} %")
        parts.append(element("span", words, class_=_phase_class(name), style=f"flex-grow:{seconds / total:.4f}"))
    spoken = ", ".join(f"{name} {format_percent(seconds / total)}" for name, seconds in totals.items())
    return element(
        "div",
        element("h3", label, element("small", note) if note else None),
        element("div", *parts, class_="bar", role="img", aria_label=f"Shares of the time of {label}: {spoken}"),
        class_="bar-row",
    )


def _table(stages: Sequence[_Stage]) -> Html:
    names = {
        name: None for phase in (*_KNOWN, None) for stage in stages for name in stage.layers if phase in (name, None)
    }
    heads = ("phase", *(stage.name for stage in stages))
    rows = []
    for name in names:
        meaning = element("small", _KNOWN[name].meaning) if name in _KNOWN else None
        head = element("th", element("i", class_=f"key {_phase_class(name)}"), name, meaning, scope="row")
        rows.append(element("tr", head, *(_cell(stage, name) for stage in stages)))
    return element(
        "table",
        element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
        element("tbody", *rows),
        class_="phases",
    )


def _cell(stage: _Stage, phase: str) -> Html:
    spent = [seconds for seconds in stage.layers.get(phase, []) if seconds > 0]
    if not spent:
        return element("td", "–")
    share = format_percent(sum(spent) / sum(stage.totals.values()))
    mean = format_duration(_mean(spent))
    if len(spent) == len(stage.steps):
        return element("td", share, element("small", mean, element("span", f" {_per_step(stage)}")))
    return element("td", share, element("small", f"{mean} in {len(spent)} step" + "s" * (len(spent) > 1)))


def _area_chart(stage: _Stage) -> Html | None:
    steps, layers = _thinned(stage)
    if len(steps) < 2 or len(layers) < 2:
        return None
    tops = [sum(seconds) for seconds in zip(*layers.values(), strict=True)]
    across, up = linear_scale(steps, num_ticks=5, tight=True), linear_scale([0.0, *tops])
    floor = [0.0] * len(steps)
    shapes, series = [], []
    for name, seconds in layers.items():
        ceiling = [low + high for low, high in zip(floor, seconds, strict=True)]
        shapes.append(_layer(name, steps, floor=floor, ceiling=ceiling, across=across, up=up))
        columns = {"x": [round(step) for step in steps], "y": [float(f"{value:.4g}") for value in seconds]}
        series.append({"label": name, "role": _phase_class(name), **columns})
        floor = ceiling
    chart = Chart(
        title=f"Time {_per_step(stage)}, {stage.name}",
        note="The phases that every step goes through, stacked, as the stage went on.",
        unit="seconds",
        curves=(),
    )
    return frame(chart, shapes=shapes, across=across, up=up, legend=(), series=series[::-1])


def _layer(
    name: str, steps: Sequence[float], *, floor: Sequence[float], ceiling: Sequence[float], across: Scale, up: Scale
) -> Html:
    over = [(across.place(step), 1 - up.place(value)) for step, value in zip(steps, ceiling, strict=True)]
    under = [(across.place(step), 1 - up.place(value)) for step, value in zip(steps, floor, strict=True)]
    outline = "L".join(f"{round(_SIZE * x)} {round(_SIZE * y)}" for x, y in (*over, *reversed(under)))
    return element("path", class_=f"layer {_phase_class(name)}", d=f"M{outline}Z")


def _thinned(stage: _Stage) -> tuple[list[float], Layers]:
    """Mean steps and mean seconds of at most 150 stretches, for the phases that most steps go through.

    An evaluation now and then would be a spike that flattens all the rest; the table has it.
    """
    count = min(len(stage.steps), _COLUMNS_DRAWN)
    edges = [round(index * len(stage.steps) / count) for index in range(count + 1)]
    steps = [_mean(stage.steps[low:high]) for low, high in pairwise(edges)]
    usual = [name for name, seconds in stage.layers.items() if sum(map(bool, seconds)) > len(seconds) / 2]
    return steps, {name: [_mean(stage.layers[name][low:high]) for low, high in pairwise(edges)] for name in usual}


def _per_step(stage: _Stage) -> str:
    return "a step" if stage.stride <= 1 else f"per {stage.stride} steps"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _phase_class(name: str) -> str:
    return f"phase-{name}" if name in _KNOWN else "phase-unknown"
