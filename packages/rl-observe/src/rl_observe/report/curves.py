"""Which charts a run is worth: the one that tells its story, and those of each stage.

A chart is drawn where its metric was logged, whatever the stage is called; a metric that nobody here has heard of gets
a plain one. It does not know how a chart is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_observe.glossary import PHASE_PREFIX, Metric, metric_of
from rl_observe.number_format import format_duration
from rl_observe.report.chart import Chart, Curve, Limit, draw
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, text
from rl_observe.report.series import Points, points, smooth
from rl_observe.report.typography import typeset_value

__all__ = ["curves_section", "headline_section"]

_ENOUGH_TO_SMOOTH = 16
_AGREEMENT = "token_mult_prob_error"
# The fp32 number after 1 lies this far above it.
_AGREEMENT_FLOOR = 2**-23
_AGREEMENT_FAULT = 0.05
_NEVER_SMOOTHED = ("learning_rate", _AGREEMENT)


@dataclass(frozen=True, slots=True)
class _Spec:
    """One chart: the metric it is about, then those that are drawn with it."""

    title: str
    metric: str
    second: str | None = None
    held_out: str | None = None
    greedy: str | None = None
    note: str | None = None
    rest: float | None = None
    """Where the metric stays if nothing of the kind happens in the run; such a line is not worth a chart."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.metric, self.second, self.held_out, self.greedy) if name)


_HEADLINES = (
    _Spec("Reward", "reward", held_out="held_out_sampled", greedy="held_out_greedy"),
    _Spec("Held-out, greedy", "held_out_greedy", held_out="held_out_sampled"),
    _Spec("Margin", "margin", held_out="held_out_margin"),
    _Spec("Loss", "loss", held_out="held_out_loss"),
)
_SPECS = (
    *_HEADLINES,
    _Spec("Pair accuracy", "pair_accuracy", held_out="held_out_pair_accuracy"),
    _Spec(
        "Log-ratio to the reference",
        "chosen_logratio",
        second="rejected_logratio",
        note="Mean of log p(answer) − log p_ref(answer), over pairs.",
    ),
    _Spec("Groups with signal", "groups_with_signal"),
    _Spec("Batches asked", "environment/generation_batches"),
    _Spec("Groups left out", "environment/groups_too_many", rest=0.0),
    _Spec("Spread of rewards", "reward_std"),
    _Spec("Entropy", "entropy"),
    _Spec("KL to the reference", "kl_reference"),
    _Spec("Trainer / engine agreement", _AGREEMENT),
    _Spec("KL, engine to trainer", "kl_engine"),
    _Spec("Staleness", "staleness", second="staleness_max", rest=0.0),
    _Spec("Effective sample size", "effective_sample_size"),
    _Spec("Importance weight", "importance_weight"),
    _Spec("Rejected tokens", "rejected_fraction", rest=0.0),
    _Spec("Clipped tokens", "clip_fraction"),
    _Spec("Ratio", "ratio"),
    _Spec("Gradient norm", "grad_norm"),
    _Spec("Learning rate", "learning_rate"),
    _Spec("Response length", "response_tokens"),
    _Spec("Longest response", "response_tokens_max"),
    _Spec("Turns", "turns", rest=1.0),
    _Spec("Truncated responses", "truncated"),
    _Spec("Failed rollouts", "failed", rest=0.0),
    _Spec("Rows without tokens", "rows_without_tokens", rest=0.0),
    _Spec("Likelihood loss", "nll"),
    _Spec("Tokens per second", "tokens_per_s"),
    _Spec("Refit time", "refit_s"),
)
_TOLD_ELSEWHERE = frozenset({"time_s", "step", "stage", "version", "refit_bytes", "sampled_tokens", "trained_tokens"})


def headline_section(record: RunRecord) -> Html | None:
    """The chart that tells the run's story, of its last stage that has one; None if nothing was logged."""
    found = _headline(record)
    if found is None:
        return None
    stage, spec = found
    rows = record.stages[stage]
    if text(record.summary, "algorithm") == stage:
        rows = _with_summary(rows, record.summary)
    return element("section", _chart(rows, spec, title=f"{spec.title}, {stage}", wide=True), id="story")


def _with_summary(rows: list[Row], summary: Mapping[str, object]) -> list[Row]:
    """Put the held-out figures of before and after at the ends, where the log has none."""
    last = max(number(row, "step") or 0.0 for row in rows)
    ends: dict[float, Row] = {}
    for when, step in (("before", 0.0), ("after", last)):
        for name in ("held_out_sampled", "held_out_greedy", "held_out_loss"):
            value = number(summary, f"{name}_{when}")
            logged = {at for at, found in points(rows, name) if found is not None}
            if value is not None and step not in logged:
                ends.setdefault(step, {"step": step})[name] = value
    return [*(ends[step] for step in ends if step < last), *rows, *(ends[step] for step in ends if step >= last)]


def curves_section(record: RunRecord) -> Html | None:
    """Every other chart, stage by stage; None if there is none."""
    headline = _headline(record)
    blocks = []
    for stage, rows in record.stages.items():
        told = headline[1].names if headline is not None and headline[0] == stage else ()
        charts = _stage_charts(rows, told=told)
        heading = element("h3", stage, element("small", _describe(rows)))
        blocks.append(element("div", heading, element("div", *charts, class_="charts"), class_="stage"))
    if not blocks:
        return None
    lead = "Pale lines are the steps as logged, dark ones their centred mean, the figures its first and its last value."
    return element("section", element("h2", "Stage by stage"), element("p", lead, class_="lead"), *blocks, id="curves")


def _headline(record: RunRecord) -> tuple[str, _Spec] | None:
    for spec in _HEADLINES:
        for stage in reversed(record.stages):
            if _is_a_curve(points(record.stages[stage], spec.metric)):
                return stage, spec
    return None


def _stage_charts(rows: Sequence[Row], *, told: Sequence[str]) -> list[Html]:
    drawn = set(told)
    charts = []
    for spec in _SPECS:
        if spec.metric not in drawn and _is_worth_a_chart(rows, spec):
            charts.append(_chart(rows, spec))
            drawn.update(spec.names)
    listed = {name for spec in _SPECS for name in spec.names} | _TOLD_ELSEWHERE
    others = {name: None for row in rows for name in row if name not in listed and not name.startswith(PHASE_PREFIX)}
    charts += [_chart(rows, _Spec(_title(name), name)) for name in others if _is_a_curve(points(rows, name))]
    return charts


def _chart(rows: Sequence[Row], spec: _Spec, *, title: str | None = None, wide: bool = False) -> Html:
    metric = metric_of(spec.metric) or Metric(spec.metric, "number", "Logged by the trainer under this name.")
    curves = _curves(rows, spec, wide=wide)
    if spec.metric == _AGREEMENT:
        return _agreement_chart(curves, title or spec.title)
    unit = metric.unit
    if unit == "score":
        values = [value for curve in curves for _, value in curve.points if value is not None]
        unit = _score_unit(values)
    return draw(
        Chart(
            title=title or spec.title,
            note=spec.note or metric.meaning,
            unit=unit,
            curves=curves,
            change=None if wide or spec.second else _change(curves, unit),
            wide=wide,
        )
    )


def _curves(rows: Sequence[Row], spec: _Spec, *, wide: bool) -> list[Curve]:
    curves = []
    for name, role in ((spec.metric, "main"), (spec.second, "second")):
        logged = points(rows, name) if name else []
        if not name or not _is_a_curve(logged):
            continue
        is_smoothed = len(logged) >= _ENOUGH_TO_SMOOTH and name not in _NEVER_SMOOTHED
        label = f"{_label(name)}, smoothed" if is_smoothed and wide else _label(name)
        # Two noisy lines and their means would be four lines.
        if is_smoothed and not spec.second:
            curves.append(Curve(label=f"{_label(name)}, each step", role="raw", points=logged))
        curves.append(Curve(label=label, role=role, points=smooth(logged) if is_smoothed else logged))
    for name, role in ((spec.greedy, "greedy"), (spec.held_out, "held-out")):
        marked = [point for point in points(rows, name) if point[1] is not None] if name else []
        if name and marked:
            curves.append(Curve(label=_label(name), role=role, points=marked))
    return curves


def _agreement_chart(curves: Sequence[Curve], title: str) -> Html:
    excess = [
        Curve(
            label="mean exp |logp − logp_old| − 1",
            role=curve.role,
            points=[
                (step, None if value is None else max(value - 1, _AGREEMENT_FLOOR)) for step, value in curve.points
            ],
        )
        for curve in curves
    ]
    worst = max(value for curve in excess for _, value in curve.points if value is not None)
    return draw(
        Chart(
            title=title,
            note="How far the mean of exp |logp − logp_old| over tokens lies above 1, which is perfect.",
            unit="scientific",
            curves=excess,
            change="≤ " + typeset_value(worst, "scientific"),
            limit=Limit(value=_AGREEMENT_FAULT, label="above: a fault"),
            log_floor=_AGREEMENT_FLOOR,
        )
    )


def _change(curves: Sequence[Curve], unit: str) -> str:
    values = [value for curve in curves if curve.role == "main" for _, value in curve.points if value is not None]
    return f"{typeset_value(values[0], unit)} → {typeset_value(values[-1], unit)}"


def _describe(rows: Sequence[Row]) -> str:
    steps = [step for row in rows if (step := number(row, "step")) is not None]
    seconds = [time for row in rows if (time := number(row, "time_s")) is not None]
    parts = [f"{max(steps):.0f} steps"]
    if len(seconds) > 1:
        parts.append(format_duration(max(seconds) - min(seconds)))
    for name in ("held_out_sampled", "held_out_greedy", "held_out_loss"):
        values = [value for _, value in points(rows, name) if value is not None]
        if values:
            unit = "number" if name == "held_out_loss" else _score_unit(values)
            parts.append(f"{_label(name)} {typeset_value(values[-1], unit)}")
    return " · ".join(parts)


def _score_unit(values: Sequence[float]) -> str:
    return "share" if min(values) >= 0 and max(values) <= 1 else "number"


def _label(name: str) -> str:
    metric = metric_of(name)
    return metric.label if metric else name


def _title(name: str) -> str:
    metric = metric_of(name)
    return metric.label[:1].upper() + metric.label[1:] if metric else name


def _is_worth_a_chart(rows: Sequence[Row], spec: _Spec) -> bool:
    logged = points(rows, spec.metric)
    return _is_a_curve(logged) and any(value not in (None, spec.rest) for _, value in logged)


def _is_a_curve(curve: Points) -> bool:
    return sum(value is not None for _, value in curve) > 1
