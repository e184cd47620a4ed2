"""One chart: curves over steps, with axes, a legend and what a screen reader says of them.

The curves are an SVG that stretches to the room it gets; everything with letters in it is HTML at its place, so that
letters keep their size on every screen. Colours come from `report.css` by the curve's role.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rl_observe.number_format import format_value
from rl_observe.report.markup import Html, element
from rl_observe.report.scale import Scale, linear_scale, log_scale
from rl_observe.report.series import Points, thin
from rl_observe.report.typography import power_of_ten, typeset, typeset_value

__all__ = ["Chart", "Curve", "Limit", "draw", "frame"]

_SIZE = 1000
_MARKED_ROLES = ("held-out", "greedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve of a chart."""

    label: str
    """Its name in the legend."""
    role: str
    """How it is drawn: raw, main, second, held-out or greedy. The last two are marked points on a thin line."""
    points: Points
    """Steps and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A value worth a dashed line across the chart."""

    value: float
    """Where it lies."""
    label: str
    """What it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw."""

    title: str
    """What is measured."""
    note: str
    """What that means, in one sentence."""
    unit: str
    """Of the values: a key of `figures.format_value`."""
    curves: Sequence[Curve]
    """Drawn in this order, the last one on top."""
    change: str | None = None
    """The figures that sum the chart up, such as "0.60 → 0.09"."""
    limit: Limit | None = None
    """A line across it."""
    log_floor: float | None = None
    """With a number, the axis is logarithmic, and smaller values are drawn at its low end."""
    wide: bool = False
    """Whether it takes the width of the page."""


def draw(chart: Chart) -> Html:
    """Draw a chart."""
    steps = [step for curve in chart.curves for step, _ in curve.points]
    values = [value for curve in chart.curves for _, value in curve.points if value is not None]
    across = linear_scale(steps, num_ticks=10 if chart.wide else 5, tight=True)
    up = _value_scale(chart, values)
    shapes: list[Html] = []
    series: list[dict[str, object]] = []
    if chart.limit is not None:
        height = _length(1 - up.place(chart.limit.value))
        shapes.append(element("path", class_="limit", d=f"M0 {height}H{_SIZE}"))
    for curve in chart.curves:
        drawn = thin(curve.points)
        shapes += _shapes(curve.role, drawn, across=across, up=up)
        series.append({"label": curve.label, "role": curve.role, **_columns(drawn)})
    return frame(
        chart,
        shapes=shapes,
        across=across,
        up=up,
        legend=[(curve.label, curve.role) for curve in chart.curves],
        series=series,
    )


def frame(
    chart: Chart,
    *,
    shapes: Sequence[Html],
    across: Scale,
    up: Scale,
    legend: Sequence[tuple[str, str]],
    series: Sequence[dict[str, object]],
) -> Html:
    """Put title, legend and axes around shapes.

    Args:
        chart: what the frame says.
        shapes: SVG elements in a square of 1000, its origin at the top left.
        across: the axis of steps.
        up: the axis of values.
        legend: labels and roles; a small chart of one metric needs none.
        series: what the pointer reads out: `label`, `role`, `x` and `y` of each.
    """
    grid = [element("path", class_="grid", d=f"M0 {_length(1 - up.place(tick))}H{_SIZE}") for tick in up.ticks]
    svg = element(
        "svg",
        element("title", f"{chart.title}. {_spoken(chart, series)}"),
        *grid,
        *shapes,
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        role="img",
    )
    limit = None
    if chart.limit is not None:
        limit = element(
            "span", chart.limit.label, class_="limit-label", style=f"bottom:{_percent(up.place(chart.limit.value))}"
        )
    return element(
        "figure",
        element(
            "figcaption",
            element("h4", chart.title),
            element("span", chart.change, class_="change") if chart.change else None,
            element("p", chart.note, class_="note"),
        ),
        _legend(legend, wide=chart.wide),
        element(
            "div",
            element("div", *_tick_labels(up, chart.unit, side="bottom"), class_="y-axis", aria_hidden="true"),
            element(
                "div", svg, limit, class_="area", data_unit=chart.unit, data_series=json.dumps(series, allow_nan=False)
            ),
            element("div", *_tick_labels(across, "step", side="left"), class_="x-axis", aria_hidden="true"),
            class_="plot",
        ),
        class_="chart wide" if chart.wide else "chart",
    )


def _value_scale(chart: Chart, values: list[float]) -> Scale:
    if chart.log_floor is not None:
        limits = [chart.limit.value] if chart.limit is not None else []
        return log_scale([*values, *limits], floor=chart.log_floor)
    if chart.unit == "share":
        # A share is read against nothing and everything, unless it never comes near everything.
        return linear_scale([0.0, 1.0 if max(values, default=1.0) > 0.4 else max(*values, 0.01)])
    return linear_scale(values)


def _shapes(role: str, curve: Points, *, across: Scale, up: Scale) -> list[Html]:
    places = [
        None if value is None else (_length(across.place(step)), _length(1 - up.place(value))) for step, value in curve
    ]
    line = element("path", class_=f"line {role}", d=_line(places))
    if role not in _MARKED_ROLES:
        return [line]
    found = [place for place in places if place is not None]
    # A line of hardly any length is all ends, round or square: a mark that no stretching of the chart distorts. Of no
    # length at all, some printers leave it out.
    dots = "".join(f"M{place[0]} {place[1]}h.1" for place in found)
    marks = [element("path", class_=f"{layer} {role}", d=dots) for layer in ("mark-ring", "mark")]
    # A line from before to after alone would tell of a way that nobody measured.
    return [line, *marks] if len(found) > 2 else marks


def _line(places: Sequence[tuple[int, int] | None]) -> str:
    parts: list[str] = []
    pen_up = True
    for place in places:
        if place is not None:
            parts.append(f"{'M' if pen_up else 'L'}{place[0]} {place[1]}")
        pen_up = place is None
    return "".join(parts)


def _columns(curve: Points) -> dict[str, object]:
    finite = [(step, value) for step, value in curve if value is not None]
    return {"x": [round(step) for step, _ in finite], "y": [float(f"{value:.5g}") for _, value in finite]}


def _legend(legend: Sequence[tuple[str, str]], *, wide: bool) -> Html | None:
    # In a small chart the pale line is the dark one's, as everywhere on the page.
    named = [(label, role) for label, role in legend if wide or role != "raw"]
    if len(named) < 2:
        return None
    items = [element("li", element("i", class_=f"key {role}"), label) for label, role in named]
    return element("ul", *items, class_="legend")


def _tick_labels(scale: Scale, unit: str, *, side: str) -> list[Html]:
    ticks = [tick for tick in scale.ticks if unit != "step" or tick == round(tick)]
    return [
        element("span", _tick_text(scale, tick, unit), style=f"{side}:{_percent(scale.place(tick))}") for tick in ticks
    ]


def _tick_text(scale: Scale, tick: float, unit: str) -> str:
    if scale.is_log:
        return power_of_ten(round(math.log10(tick)))
    if unit == "step":
        return f"{tick:g}"
    if unit == "share":
        return f"{100 * tick:g} %"
    if unit in ("count", "seconds", "bytes"):
        return format_value(tick, unit) if tick else "0"
    largest = max(abs(scale.low), abs(scale.high))
    if not 0.001 <= largest < 100_000:
        return typeset(f"{tick:.1e}") if tick else "0"
    step = scale.ticks[1] - scale.ticks[0]
    decimals = next(digits for digits in range(12) if abs(round(step, digits) - step) < 1e-3 * step or digits == 11)
    return typeset(f"{tick:.{decimals}f}")


def _spoken(chart: Chart, series: Sequence[dict[str, object]]) -> str:
    sentences = [chart.note]
    for one in series:
        steps, values = one["x"], one["y"]
        if not (isinstance(steps, list) and isinstance(values, list) and values):
            continue
        first, last = (typeset_value(values[end], chart.unit) for end in (0, -1))
        sentences.append(f"{one['label']}: {first} at step {steps[0]}, {last} at step {steps[-1]}.")
    return " ".join(sentences)


def _length(place: float) -> int:
    return round(_SIZE * place)


def _percent(place: float) -> str:
    return f"{100 * place:.2f}%"
