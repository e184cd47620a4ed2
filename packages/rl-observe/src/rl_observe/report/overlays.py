"""The curves of several runs over one another, one chart a metric that at least two of them logged.

It does not know how a chart is drawn, nor what else the runs left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_observe.glossary import PHASE_PREFIX, Metric, metric_of
from rl_observe.report.chart import Chart, Curve, draw
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row
from rl_observe.report.series import Points, points, smooth

__all__ = ["NUM_ROLES", "overlay_sections"]

NUM_ROLES = 8
"""Colours that runs are told apart by; twice as many runs take them again, dashed."""

_ENOUGH_TO_SMOOTH = 16
_FIRST = ("reward", "held_out_sampled", "held_out_greedy", "margin", "held_out_loss", "loss", "pair_accuracy")
_NOT_DRAWN = frozenset({"stage", "step", "time_s", "version", "refit_bytes"})


def overlay_sections(names: Sequence[str], runs: Sequence[Mapping[str, list[Row]]]) -> list[Html]:
    """The headline chart over all runs, then a section a stage that two or more of them went through.

    Args:
        names: of the runs.
        runs: the logged steps of each, by stage.
    """
    stages = {stage: None for run in runs for stage in run if sum(stage in other for other in runs) > 1}
    sections = []
    for stage in stages:
        rows = [run.get(stage, []) for run in runs]
        charts = _charts(names, rows)
        if not charts:
            continue
        lead = "Centred means of what was logged, over the optimizer steps of the stage; evaluations as they are."
        sections.append(
            element(
                "section",
                element("h2", stage),
                element("p", lead, class_="lead"),
                charts[0],
                element("div", *charts[1:], class_="charts") if charts[1:] else None,
                class_="overlay",
            )
        )
    return sections[::-1]


def _charts(names: Sequence[str], rows: Sequence[Sequence[Row]]) -> list[Html]:
    logged = {name: None for run in rows for row in run for name in row}
    metrics = [
        *(name for name in _FIRST if name in logged),
        *(name for name in logged if name not in {*_FIRST, *_NOT_DRAWN} and not name.startswith(PHASE_PREFIX)),
    ]
    charts: list[Html] = []
    for metric in metrics:
        curves = [points(run, metric) for run in rows]
        if sum(_is_a_curve(curve) for curve in curves) > 1:
            charts.append(_chart(metric, list(zip(names, curves, strict=True)), wide=not charts))
    return charts


def _chart(name: str, runs: Sequence[tuple[str, Points]], *, wide: bool) -> Html:
    metric = metric_of(name) or Metric(name, "number", "Logged by the trainer under this name.")
    curves = [
        Curve(label=label, role=_role(index), points=_drawn(curve))
        for index, (label, curve) in enumerate(runs)
        if _is_a_curve(curve)
    ]
    unit = metric.unit
    if unit == "score":
        values = [value for curve in curves for _, value in curve.points if value is not None]
        unit = "share" if min(values) >= 0 and max(values) <= 1 else "number"
    title = metric.label[:1].upper() + metric.label[1:]
    return draw(Chart(title=title, note=metric.meaning, unit=unit, curves=curves, wide=wide))


def _role(index: int) -> str:
    return f"run-{index % NUM_ROLES}" + (" dashed" if index >= NUM_ROLES else "")


def _drawn(curve: Points) -> Points:
    known = [point for point in curve if point[1] is not None]
    # An evaluation now and then is a line from one to the next, not one broken everywhere between.
    if len(known) < len(curve) / 2 or len(curve) < _ENOUGH_TO_SMOOTH:
        return known
    return smooth(curve)


def _is_a_curve(curve: Points) -> bool:
    return sum(value is not None for _, value in curve) > 1
