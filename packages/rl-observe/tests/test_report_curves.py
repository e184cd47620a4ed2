"""The report's curves before they are drawn, its phases, and its colors, against figures known beforehand."""

import json
import math
import re
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_observe import RunDirectory, write_report
from rl_observe.report.curves import Chart, Curve, points, smooth, thin


def test_a_chart_hands_over_its_numbers_and_breaks_where_there_is_none():
    curve = [(0.0, 0.0), (1.0, 1.0), (2.0, None), (3.0, 0.123456789)]
    data = Chart("t", "n", "share", [Curve("c", "main", curve)], group="g").data
    assert data["series"] == [{"label": "c", "role": "main", "x": [0, 1, 2, 3], "y": [0.0, 1.0, None, 0.12346]}]
    assert (data["unit"], data["group"], data["kind"], data["wide"]) == ("share", "g", "linear", False)


def test_steps_that_were_logged_twice_or_out_of_order_are_one_ascending_curve():
    rows = [{"step": step, "x": value} for step, value in ((2, 1.0), (1, 3.0), (2, 5.0))] + [{"step": 3}]
    assert points(rows, "x") == [(1.0, 3.0), (2.0, 5.0)]


def test_phases_are_drawn_with_their_shares(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    rows = [{"stage": "grpo", "step": step, "phase_s/train": 0.75, "phase_s/generate": 0.25} for step in (4, 8)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(run).read_text()
    assert re.search(r'phase-generate" style="flex-grow:0.2500".*phase-train" style="flex-grow:0.7500"', page)
    assert "Shares of the time of grpo: generate 25.0 %, train 75.0 %" in page
    assert "<td>75.0 %<small>750 ms per 4 steps</small></td>" in page
    stacked = json.loads(re.search(r"Time per 4 steps, grpo.*?json\">(.*?)</script>", page, re.DOTALL)[1])
    assert stacked["kind"] == "stacked"
    assert [(one["label"], one["role"], one["x"], one["y"]) for one in stacked["series"]] == [
        ("generate", "phase-generate", [4, 8], [0.25, 0.25]),
        ("train", "phase-train", [4, 8], [0.75, 0.75]),
    ]


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


@pytest.fixture(params=["light", "dark"])
def colors(request):
    style = resources.files("rl_observe.report").joinpath("report.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root(?::not\(\.printing\))? \{(.*?)\}", style, re.DOTALL)[:2]
    )
    return light if request.param == "light" else light | dark


def test_text_and_fills_stand_out_from_what_they_lie_on(colors):
    # WCAG 2.2: 4.5 for text, 3 for graphics.
    for name in ("ink", "ink-2", "ink-3", "good", "bad", "main"):
        assert contrast(colors[name], colors["surface"]) >= 4.5, name
    assert contrast(colors["ink-3"], colors["page"]) >= 4.5
    assert contrast(colors["good"], colors["good-soft"]) >= 4.5
    assert contrast(colors["bad"], colors["bad-soft"]) >= 4.5
    for phase in [name for name in colors if name.startswith("phase-")]:
        assert contrast(colors["on-phase"], colors[phase]) >= 4.5, phase
    for name in ("held-out", "greedy", "second"):
        assert contrast(colors[name], colors["surface"]) >= 3, name


def test_training_the_longest_phase_stands_out_least(colors):
    train = contrast(colors["phase-train"], colors["surface"])
    assert train <= min(contrast(colors[name], colors["surface"]) for name in colors if name.startswith("phase-"))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
