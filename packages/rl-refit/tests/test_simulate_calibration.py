"""The simulator against published refits: what it was fitted on, what it predicts, and how far off it is, as found."""

from __future__ import annotations

import pytest
from refit_simulator.calibration import compare, errors_of
from refit_simulator.costs import CALIBRATED
from refit_simulator.published import NOT_PREDICTED, ROWS
from refit_simulator.report import calibration_as_text, calibration_errors


@pytest.fixture(scope="module")
def comparisons():
    return {comparison.row.name: comparison for comparison in compare()}


def test_the_ladder_comes_out_in_order_and_within_15_percent(comparisons):
    steps = [comparison for name, comparison in comparisons.items() if name.startswith("ladder")]
    assert [step.row.published_seconds for step in steps] == pytest.approx([692.5, 450.0, 120.0, 47.2])
    predicted = [step.simulation.total_seconds for step in steps]
    assert predicted == sorted(predicted, reverse=True)
    assert all(1 / 1.15 < step.ratio < 1.15 for step in steps)


def test_98_percent_of_the_ladders_first_step_is_no_byte_moving(comparisons):
    simulation = comparisons["ladder 1: a handle a tensor"].simulation
    assert sum(simulation.serial.values()) > 0.98 * simulation.total_seconds
    assert simulation.dominating == "control"


def test_rows_that_constants_were_fitted_on_are_reproduced(comparisons):
    fitted = [comparison for comparison in comparisons.values() if comparison.row.fits]
    assert all(comparison.ratio == pytest.approx(1, abs=0.02) for comparison in fitted)
    constants = {name for comparison in fitted for name in comparison.row.fits.split(", ")}
    assert constants <= set(CALIBRATED.__slots__)


def test_rows_held_out_are_off_by_as_much_as_we_say(comparisons):
    errors = calibration_errors(list(comparisons.values()))["held out"]
    assert errors.rows == 26
    assert errors.median_factor == pytest.approx(1.57, abs=0.05)
    assert errors.within_two == 20
    assert errors.worst_factor == pytest.approx(4.3, abs=0.2)
    assert errors.worst_row == "Perplexity Qwen3-235B, 128 to 32"
    assert errors.bias == pytest.approx(0.78, abs=0.03)


def test_slices_into_eight_gpus_are_predicted_within_5_percent_without_a_fit(comparisons):
    for name in ("sharded_rdt Qwen3-235B to EP8", "sharded_rdt Qwen3-235B to TP8"):
        assert not comparisons[name].row.fits
        assert comparisons[name].ratio == pytest.approx(1, abs=0.05)


def test_nothing_published_beats_the_bound(comparisons):
    for comparison in comparisons.values():
        assert comparison.simulation.bound_seconds < comparison.row.seconds[0]
        assert comparison.simulation.bound_seconds < comparison.simulation.total_seconds


def test_every_row_says_where_and_when():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.source and row.date.startswith("20") and row.seconds[0] <= row.seconds[1] for row in ROWS)
    assert all(reason for _, reason in NOT_PREDICTED)


def test_the_table_has_all_rows_all_errors_and_all_assumptions(comparisons):
    text = calibration_as_text(list(comparisons.values()))
    assert all(row.name in text for row in ROWS)
    assert all(row.assumed in text for row in ROWS)
    assert "held out: 26 rows; off by a factor of 1.5" in text


def test_a_factor_too_slow_counts_as_much_as_one_too_fast(comparisons):
    some = list(comparisons.values())[:2]
    errors = errors_of(some)
    assert errors.worst_factor == pytest.approx(max(max(c.ratio, 1 / c.ratio) for c in some))
    assert errors.worst_factor >= errors.median_factor >= 1
