from __future__ import annotations

import pytest

from rl_refit import CoverageError, Layout, Manifest, TensorMeta, plan_refit


def manifest(*names, shape=(2,), dtype="float32", **ties):
    given = {"shape": shape, "dtype": dtype, "layout": Layout.whole()}
    return Manifest(
        (
            *(TensorMeta(name=n, **given) for n in names),
            *(TensorMeta(name=n, tied_to=to, **given) for n, to in ties.items()),
        )
    )


def test_one_error_lists_every_difference():
    wide = TensorMeta(name="wide", shape=(3,), dtype="float32", layout=Layout.whole())
    half = TensorMeta(name="half", shape=(2,), dtype="bfloat16", layout=Layout.whole())
    source = Manifest((*manifest("a", "lora", "adapter", "wide", "half").tensors,))
    sink = Manifest((*manifest("a", "norm", "scale").tensors, wide, half))
    with pytest.raises(CoverageError) as caught:
        plan_refit(source, sink)
    assert caught.value.unfed == ("norm", "scale")
    assert caught.value.unmapped == ("lora", "adapter")
    assert str(caught.value) == (
        "source and sink do not hold the same tensors.\n"
        "2 sink tensors that the source does not feed:\n  norm\n  scale\n"
        "2 source tensors that have no place in the sink:\n  lora\n  adapter\n"
        "2 tensors that differ:\n"
        "  wide: shape [2] in the source, [3] in the sink\n"
        "  half: dtype float32 in the source, bfloat16 in the sink\n"
        "nothing is cast, reshaped or untied on the way: give both sides one dtype, one shape and the same ties"
    )


def sent(source, sink):
    return [route.region.name for route in plan_refit(source, sink).routes]


def test_tied_weights_are_sent_once():
    tied = manifest("embed", head="embed")
    assert sent(tied, tied) == ["embed"]


def test_the_two_sides_may_name_either_of_the_tied_as_the_root():
    assert sent(manifest("head", embed="head"), manifest("embed", head="embed")) == ["embed"]


def test_a_tie_of_the_source_may_feed_two_tensors_of_the_sink():
    assert sent(manifest("embed", head="embed"), manifest("embed", "head")) == ["embed", "head"]


def test_either_side_may_leave_out_a_tied_name():
    assert sent(manifest("embed", head="embed"), manifest("embed")) == ["embed"]
    assert sent(manifest("embed"), manifest("embed", head="embed")) == ["embed"]


def test_two_tensors_cannot_become_one():
    with pytest.raises(CoverageError, match="head: tied to embed in the sink, a tensor of its own in the source"):
        plan_refit(manifest("embed", "head"), manifest("embed", head="embed"))


def test_a_tie_whose_root_is_missing_is_not_fed():
    with pytest.raises(CoverageError) as caught:
        plan_refit(manifest("head"), manifest("embed", head="embed"))
    assert caught.value.unfed == ("embed",)
