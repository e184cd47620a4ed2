"""The break-even bandwidth against its formula, and against the crossing of the two times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from files_parties import manifest_of

from rl_refit import plan_refit
from rl_refit.delta.forecast import CodecSpeed, explain_delta, forecast_delta, measure_codec

SPEED = CodecSpeed(changed_share=0.01, encode_bytes_per_s=2e9, apply_bytes_per_s=4e9, wire_share=0.0155)


def plan(sources, sinks):
    """1,000 rows of 1,000 bfloat16: 2 MB."""
    tensors = {"w": (torch.bfloat16, (1000, 1000))}
    return plan_refit(manifest_of(*sources, tensors), manifest_of(*sinks, tensors))


def test_the_break_even_is_the_formula():
    forecast = forecast_delta(plan((1, None), (1, None)), SPEED)
    assert forecast.break_even_bytes_per_s == pytest.approx((1 - 0.0155) / (1 / 2e9 + 1 / 4e9))
    forecast = forecast_delta(plan((4, 0), (2, 1)), SPEED)
    assert (forecast.total_bytes, forecast.source_bytes, forecast.sink_bytes) == (2_000_000, 500_000, 1_000_000)
    assert forecast.break_even_bytes_per_s == pytest.approx(2e6 * (1 - 0.0155) / (5e5 / 2e9 + 1e6 / 4e9))


def test_both_take_as_long_at_the_break_even_and_the_delta_less_below():
    forecast = forecast_delta(plan((2, 0), (1, None)), SPEED)
    whole, delta = forecast.seconds(forecast.break_even_bytes_per_s)
    assert whole == pytest.approx(delta)
    assert (
        forecast.seconds(forecast.break_even_bytes_per_s / 2)[0]
        > forecast.seconds(forecast.break_even_bytes_per_s / 2)[1]
    )
    assert (
        forecast.seconds(forecast.break_even_bytes_per_s * 2)[0]
        < forecast.seconds(forecast.break_even_bytes_per_s * 2)[1]
    )


def test_a_replica_costs_the_link_nothing():
    assert forecast_delta(plan((1, None), (3, None)), SPEED).total_bytes == 2_000_000


def test_a_delta_that_is_no_smaller_never_wins():
    dense = CodecSpeed(changed_share=1.0, encode_bytes_per_s=2e9, apply_bytes_per_s=4e9, wire_share=1.001)
    assert forecast_delta(plan((1, None), (1, None)), dense).break_even_bytes_per_s == 0.0


def test_the_text_says_share_speeds_and_break_even():
    text = explain_delta(plan((1, None), (1, None)), 0.01, speed=SPEED)
    assert text.splitlines()[0] == "1.00% changed elements are 1.55% of the wire's 2,000,000 bytes"
    assert "encode   2.00 GB/s a core, 2,000,000 bytes at the busiest source" in text
    assert "a delta wins below 10.50 Gbit/s" in text
    assert "at   1.0 Gbit/s: whole     0.016 s, delta" in text


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 1.0])
def test_the_measured_share_on_the_wire_is_that_of_the_format(share):
    speed = measure_codec(share, nbytes=2**20)
    assert speed.wire_share == pytest.approx(min(1.0, share * 1.5), rel=0.06, abs=3e-4)
    assert speed.encode_bytes_per_s > 0 < speed.apply_bytes_per_s
    with pytest.raises(ValueError, match="changed_share is a share"):
        measure_codec(1.5)
