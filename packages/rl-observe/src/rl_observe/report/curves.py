"""The report's curves: which metrics get a chart, and each chart as the JSON that report.js hands to uPlot.

`headline_chart` tells the story of the run, `stage_charts` shows the other metrics, `overlay_charts` compares runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from importlib import resources
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from rl_observe.glossary import PHASE_PREFIX, Metric, format_duration, metric_of, typeset_value
from rl_observe.log_files import Row
from rl_observe.report.record import RunRecord, number, text

Points = Sequence[tuple[float, float | None]]
"""Steps in ascending order and values; None where a step has no finite value, which breaks the line."""

NUM_COLORS = 8
"""Colors that tell runs apart in a comparison; the next eight runs reuse them with dashed lines."""

_MAX_POINTS = 600  # more points than a chart has pixels only make the page heavy
_MIN_TO_SMOOTH = 16
_AGREEMENT = "token_mult_prob_error"
_AGREEMENT_FAULT = 0.05
_EPSILON_FP32 = 2**-23  # the distance from 1 to the next larger fp32 number

_CHARTS: dict[str, Any] = tomllib.loads(
    resources.files(__package__).joinpath("charts.toml").read_text(encoding="utf-8")
)
_LOGRATIO = ("Log-ratio to the reference", "Mean of log p(response) − log p_ref(response), over pairs.")


class Curve(NamedTuple):
    """One line of a chart."""

    label: str
    role: str  # its color and style: a CSS variable of report.css, such as `main`, `raw`, `held-out` or `run-3`
    points: Points


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart, ready for the template."""

    title: str
    note: str  # what is measured, in one sentence
    unit: str  # of the values: a unit of `glossary.Metric`
    curves: Sequence[Curve]  # drawn in this order, the last one on top
    _: KW_ONLY
    group: str  # charts of one group read out the same step when the pointer is over one of them
    change: str = ""  # first and last value, such as "0.60 → 0.09"
    kind: Literal["linear", "log", "stacked"] = "linear"
    wide: bool = False  # as wide as the page

    @property
    def data(self) -> dict[str, object]:
        """The chart as JSON for report.js; values are rounded to five digits."""
        series = [
            {
                "label": label,
                "role": role,
                "x": [int(step) if step.is_integer() and abs(step) < 2**53 else step for step, _ in curve],
                "y": [None if value is None else float(f"{value:.5g}") for _, value in curve],
            }
            for label, role, curve in self.curves
        ]
        return {"unit": self.unit, "kind": self.kind, "group": self.group, "wide": self.wide, "series": series}

    @property
    def ends(self) -> list[tuple[str, tuple[float, float | None], tuple[float, float | None]]]:
        """Label, first and last point of each curve, for a screen reader."""
        lines = [curve for curve in self.curves if curve.role not in ("raw", "limit", "interval")]
        known = [(line.label, [point for point in line.points if point[1] is not None]) for line in lines]
        return [(label, curve[0], curve[-1]) for label, curve in known if curve]


def headline_chart(record: RunRecord) -> Chart | None:
    """The chart that tells the story of the run, from the last stage that has one; None if nothing was logged."""
    found = _headline(record)
    if found is None:
        return None
    stage, name = found
    rows = record.stages[stage]
    if text(record.summary, "algorithm") == stage:
        # The summary has the held-out figures of before and after even if the log has none at these steps.
        last = max(number(row, "step") or 0.0 for row in rows)
        for held_out in ("held_out_sampled", "held_out_greedy", "held_out_loss"):
            logged = {step for step, _ in _known(rows, held_out)}
            for when, step in (("before", 0.0), ("after", last)):
                value = number(record.summary, f"{held_out}_{when}")
                if value is not None and step not in logged:
                    rows = [*rows, {"step": step, held_out: value}]
    chart = _chart(rows, name, group="headline", wide=True)
    return replace(chart, title=f"{chart.title}, {stage}")


def stage_charts(record: RunRecord) -> list[dict[str, Any]]:
    """All other charts, stage by stage: `name`, `facts`, `charts`, `folded` charts, and `constants`.

    A metric that never changes is a constant, with its value, and gets no chart.
    """
    headline = _headline(record)
    blocks = []
    for stage, rows in record.stages.items():
        # What is drawn in another chart.
        done = {headline[1], *_CHARTS["marks"][headline[1]]} if headline is not None and headline[0] == stage else set()
        charts: list[Chart] = []
        folded: list[Chart] = []
        constants = []
        for name in _charted(rows):
            known = [value for _, value in _known(rows, name)]
            if name in done or len(known) < 2:
                continue
            if max(known) - min(known) > 1e-9 * max(map(abs, known)):
                done |= {*_CHARTS["marks"].get(name, ()), _CHARTS["second"].get(name, name)}
                (folded if name in _CHARTS["folded"] else charts).append(_chart(rows, name, group=stage))
            else:
                constants.append((_metric(name).label, typeset_value(known[0], _unit(_metric(name), known))))
        # Length, duration and last evaluations.
        facts = [f"{max(number(row, 'step') or 0.0 for row in rows):.0f} steps"]
        seconds = [time for row in rows if (time := number(row, "time_s")) is not None]
        if len(seconds) > 1:
            facts.append(format_duration(max(seconds) - min(seconds)))
        for name in ("held_out_sampled", "held_out_greedy", "held_out_loss"):
            metric, values = _metric(name), [value for step, value in _known(rows, name) if step > 0]
            facts += [f"{metric.label} {typeset_value(values[-1], _unit(metric, values))}"] if values else []
        block = {"name": stage, "facts": " · ".join(facts), "charts": charts, "folded": folded, "constants": constants}
        blocks.append(block)
    return blocks


def overlay_charts(names: Sequence[str], runs: Sequence[Mapping[str, list[Row]]]) -> dict[str, list[Chart]]:
    """One chart for each metric that at least two runs logged, by stage; the last stage comes first.

    Args:
        names: of the runs, for the legend.
        runs: the logged steps of each run, by stage.
    """
    stages = {stage: None for run in runs for stage in run if sum(stage in other for other in runs) > 1}
    overlays: dict[str, list[Chart]] = {}
    for stage in reversed(stages):
        rows = [run.get(stage, []) for run in runs]
        charts: list[Chart] = []
        for name in _charted([row for run in rows for row in run]):
            metric, curves = _metric(name), []
            for index, run in enumerate(rows):
                curve = points(run, name)
                known = _known(run, name)
                # An evaluation now and then is joined by a line, not broken at the steps in between.
                is_sparse = len(known) < len(curve) / 2 or len(curve) < _MIN_TO_SMOOTH
                if len(known) > 1:
                    role = f"run-{index % NUM_COLORS}" + (" dashed" if index >= NUM_COLORS else "")
                    curves.append(Curve(names[index], role, thin(known if is_sparse else smooth(curve))))
            # What is the same in all runs, such as a learning rate, tells nothing about their differences.
            if len(curves) > 1 and any(curve.points != curves[0].points for curve in curves):
                unit, wide = _unit(metric, _values(curves)), not charts
                chart = Chart(_title(metric), metric.meaning, unit, curves, group=stage, wide=wide)
                charts.append(_agreement_chart(chart) if name == _AGREEMENT else chart)
        if charts:
            overlays[stage] = charts
    return overlays


def points(rows: Sequence[Row], name: str) -> Points:
    """One metric over the steps of a stage, in ascending order; rows that do not name it are left out."""
    found = {
        float(step): number(row, name) for row in rows if name in row and (step := number(row, "step")) is not None
    }
    return sorted(found.items())


def smooth(curve: Points) -> Points:
    """The centered mean over a twelfth of the curve, at least five points.

    Towards an end the window shrinks to two neighbors, so that a slope stays a slope.
    """
    half = max(2, len(curve) // 24)
    sums = list(accumulate((value or 0.0 for _, value in curve), initial=0.0))
    counts = list(accumulate((value is not None for _, value in curve), initial=0))
    smoothed: list[tuple[float, float | None]] = []
    for index, (step, value) in enumerate(curve):
        reach = max(2, min(half, index, len(curve) - 1 - index))
        low, high = max(0, index - reach), min(len(curve), index + reach + 1)
        smoothed.append((step, None if value is None else (sums[high] - sums[low]) / (counts[high] - counts[low])))
    return smoothed


def thin(curve: Points) -> Points:
    """At most 600 points of the curve: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(curve) <= _MAX_POINTS:
        return curve
    stretch = 2 * len(curve) / _MAX_POINTS
    kept: list[tuple[float, float | None]] = []
    for index in range(_MAX_POINTS // 2):
        part = curve[round(index * stretch) : round((index + 1) * stretch)]
        finite = [(step, value) for step, value in part if value is not None]
        if finite:
            kept += sorted({min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])})
        else:
            kept += part[:1]
    return kept


def _headline(record: RunRecord) -> tuple[str, str] | None:
    """Stage and metric of the headline chart."""
    for name in _CHARTS["headlines"]:
        for stage in reversed(record.stages):
            if len(_known(record.stages[stage], name)) > 1:
                return stage, name
    return None


def _chart(rows: Sequence[Row], name: str, *, group: str, wide: bool = False) -> Chart:
    metric, second = _metric(name), _CHARTS["second"].get(name)
    curves: list[Curve] = []
    for each, role in ((name, "main"), (second, "second")):
        if not each or len(_known(rows, each)) < 2:
            continue
        logged = points(rows, each)
        kept, label = thin(logged), _metric(each).label
        if len(logged) >= _MIN_TO_SMOOTH and each not in ("learning_rate", _AGREEMENT):
            if second is None:  # two noisy lines and their means would be four lines
                curves.append(Curve(f"{label}, each step", "raw", kept))
            steps = {step for step, _ in kept}
            kept = [point for point in smooth(logged) if point[0] in steps]
            label += ", mean" if wide else ""
        curves.append(Curve(label, role, kept))
    main = _values([curve for curve in curves if curve.role == "main"])
    for each, role in _CHARTS["marks"].get(name, {}).items():
        for end in ("low", "high") if wide else ():  # the ends of the 95 % interval are drawn as a band
            band = _known(rows, f"{each}/{end}")
            curves += [Curve(f"{role} {end}", "interval", band)] if band else []
        marks = _known(rows, each)
        curves += [Curve(_metric(each).label, role, thin(marks))] if marks else []
    unit = _unit(metric, _values(curves))
    title, note = _LOGRATIO if name == "chosen_logratio" else (_title(metric), metric.meaning)
    change = "" if wide or second or not main else " → ".join(typeset_value(main[end], unit) for end in (0, -1))
    chart = Chart(title, note, unit, curves, group=group, change=change, wide=wide)
    return _agreement_chart(chart) if name == _AGREEMENT else chart


def _agreement_chart(chart: Chart) -> Chart:
    """The distance above 1 on a logarithmic axis, with the line above which it is a fault."""

    def excess(curve: Points) -> Points:
        return [(step, None if value is None else max(value - 1, _EPSILON_FP32)) for step, value in curve]

    curves = [curve._replace(points=excess(curve.points)) for curve in chart.curves]
    ends = [points[end][0] for _, _, points in curves for end in (0, -1)]
    limit = Curve("fault", "limit", [(min(ends), _AGREEMENT_FAULT), (max(ends), _AGREEMENT_FAULT)])
    return replace(
        chart,
        note="Mean of exp |logp − logp_old| over tokens, minus 1: 0 is perfect, above the dashed line is a fault.",
        unit="scientific",
        curves=[limit, *curves],
        change=f"≤ {typeset_value(max(_values(curves)), 'scientific')}",
        kind="log",
    )


def _metric(name: str) -> Metric:
    return metric_of(name) or Metric(name, "number", "Logged by the trainer under this name.")


def _title(metric: Metric) -> str:
    return metric.label[:1].upper() + metric.label[1:]


def _unit(metric: Metric, values: Sequence[float]) -> str:
    """The unit of a metric; a score is a share if all values are between 0 and 1."""
    if metric.unit != "score":
        return metric.unit
    return "share" if values and min(values) >= 0 and max(values) <= 1 else "number"


def _known(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points(rows, name) if value is not None]


def _values(curves: Sequence[Curve]) -> list[float]:
    return [value for curve in curves for _, value in curve.points if value is not None]


def _charted(rows: Sequence[Row]) -> list[str]:
    """The logged metrics that may have a chart, in the order in which a reader wants them."""
    logged = dict.fromkeys(name for row in rows for name in row)
    ordered = dict.fromkeys(
        [*_CHARTS["order"], *(name for name in logged if name not in _CHARTS["folded"]), *_CHARTS["folded"]]
    )
    hidden = (
        *_CHARTS["not_charted"],
        *(name for name in logged if name.startswith(PHASE_PREFIX) or name.endswith(("/low", "/high"))),
    )
    return [name for name in ordered if name in logged and name not in hidden]
