"""What the report is drawn with: markup, axes, curves, phases and colours, against figures known beforehand."""

import json
import math
import re
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_observe import RunDirectory, write_report
from rl_observe.report.chart import Chart, Curve, draw
from rl_observe.report.markup import element
from rl_observe.report.scale import linear_scale, log_scale
from rl_observe.report.series import smooth, thin


def test_markup_escapes_what_it_did_not_make():
    inner = element("b", "a < b")
    assert element("p", inner, " & 'c'", class_="x", data_unit='"') == (
        '<p class="x" data-unit="&quot;"><b>a &lt; b</b> &amp; &#x27;c&#x27;</p>'
    )


def test_a_curve_is_drawn_where_its_numbers_are_and_breaks_where_there_is_none():
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, None), (3.0, 0.25), (4.0, 0.5)]
    chart = Chart(title="t", note="n", unit="share", curves=[Curve(label="c", role="main", points=points)])
    # In a square of 1000 whose origin is at the top left.
    assert '<path class="line main" d="M0 1000L250 0M750 750L1000 500"/>' in draw(chart)


def test_two_marks_are_not_joined_since_nobody_measured_the_way_between_them():
    def lines(num_points):
        points = [(float(step), 0.5) for step in range(num_points)]
        held_out = Curve(label="c", role="held-out", points=points)
        return draw(Chart(title="t", note="n", unit="share", curves=[held_out])).count('class="line held-out"')

    assert (lines(2), lines(3)) == (0, 1)


def test_phases_are_drawn_with_their_shares(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    rows = [{"stage": "grpo", "step": step, "phase_s/train": 0.75, "phase_s/generate": 0.25} for step in (4, 8)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run).read_text()
    assert re.search(r'phase-generate" style="flex-grow:0.2500".*phase-train" style="flex-grow:0.7500"', page)
    assert "Shares of the time of grpo: generate 25.0 %, train 75.0 %" in page
    assert "750 ms<span> per 4 steps</span>" in page
    assert '<path class="layer phase-generate" d="M0 750L1000 750L1000 1000L0 1000Z"/>' in page


@example([0.0, 5e-324], 0.0)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1), st.floats(-1e300, 1e300))
def test_a_linear_axis_holds_every_value_between_round_ends(numbers, probe):
    scale = linear_scale(numbers)
    invisible = 1e-8 * (max(numbers) - min(numbers))
    assert scale.low <= min(numbers) + invisible
    assert scale.high >= max(numbers) - invisible
    assert scale.low < scale.high
    assert 2 <= len(scale.ticks) <= 8
    assert list(scale.ticks) == sorted(scale.ticks)
    assert 0.0 <= scale.place(probe) <= 1.0


@given(st.lists(st.floats(1e-12, 1e12), min_size=1))
def test_a_logarithmic_axis_has_powers_of_ten_for_ticks_and_puts_ratios_at_equal_distances(numbers):
    scale = log_scale(numbers, floor=1e-9)
    assert all(0.0 <= scale.place(value) <= 1.0 for value in numbers)
    assert all(math.isclose(math.log10(tick), round(math.log10(tick)), abs_tol=1e-9) for tick in scale.ticks)
    middle = math.sqrt(scale.low * scale.high)
    assert math.isclose(scale.place(middle), 0.5, abs_tol=1e-9)


@given(st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=4000))
def test_thinning_keeps_the_order_and_the_extremes(numbers):
    curve = [(float(step), value) for step, value in enumerate(numbers)]
    kept = thin(curve)
    finite = [value for value in numbers if value is not None]
    assert len(kept) <= 600
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert set(kept) <= set(curve)
    if finite:
        drawn = [value for _, value in kept if value is not None]
        assert (min(drawn), max(drawn)) == (min(finite), max(finite))


def test_smoothing_keeps_a_line_a_line_and_a_gap_a_gap():
    line = [(float(step), 2.0 * step) for step in range(100)]
    inner = list(zip(line, smooth(line), strict=True))[2:-2]
    assert all(math.isclose(before[1], after[1], abs_tol=1e-9) for before, after in inner)
    with_gap = smooth([(0.0, 1.0), (1.0, None), (2.0, 4.0)])
    assert with_gap == [(0.0, 2.5), (1.0, None), (2.0, 2.5)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_fills_stand_out_from_what_they_lie_on(theme):
    style = resources.files("rl_observe.report").joinpath("report.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    )
    colours = light if theme == "light" else light | dark
    # WCAG 2.2: 4.5 for text, 3 for graphics.
    for name in ("ink", "ink-2", "ink-3", "good", "bad", "accent"):
        assert contrast(colours[name], colours["surface"]) >= 4.5, name
    assert contrast(colours["ink-3"], colours["page"]) >= 4.5
    assert contrast(colours["good"], colours["good-soft"]) >= 4.5
    assert contrast(colours["bad"], colours["bad-soft"]) >= 4.5
    for phase in ("generate", "reward", "reference", "train", "refit", "evaluate", "other"):
        assert contrast(colours["on-fill"], colours[phase]) >= 4.5, phase
    for name in ("held-out", "greedy"):
        assert contrast(colours[name], colours["surface"]) >= 3, name


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
