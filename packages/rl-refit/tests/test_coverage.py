"""Names, shapes, dtypes and ties of two sides: what may be planned, and the list of all that may not."""

from __future__ import annotations

import pytest

from rl_refit.errors import CoverageError
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import plan_refit


def manifest(*names, shape=(2,), dtype="float32", feeding="fed", **ties):
    given = {"shape": shape, "dtype": dtype, "layout": Layout.whole(), "feeding": feeding}
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
        "what the engine recomputes or never changes is declared to the sink as derived or constant\n"
        "nothing is reshaped or untied on the way, and cast only where "
        "ModuleSource(cast=torch.bfloat16) says so: give both sides one dtype, one shape and the same ties"
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


def both(*manifests):
    return Manifest(tuple(meta for one in manifests for meta in one.tensors))


@pytest.mark.parametrize("feeding", ["derived", "constant"])
def test_what_the_sink_makes_itself_needs_no_source(feeding):
    assert sent(manifest("w"), both(manifest("w"), manifest("cos", feeding=feeding))) == ["w"]


@pytest.mark.parametrize("feeding", ["derived", "constant"])
def test_what_the_sink_makes_itself_is_not_sent_even_where_the_source_has_it(feeding):
    """And may differ in shape and dtype, since no byte of it moves."""
    other = manifest("cos", shape=(9,), dtype="float64")
    assert sent(both(manifest("w"), other), both(manifest("w"), manifest("cos", feeding=feeding))) == ["w"]


def test_what_is_tied_to_a_constant_is_constant():
    sink = manifest("embed", feeding="constant", head="embed")
    assert sent(manifest(), sink) == []
    assert sent(manifest("embed", "head", dtype="int8"), sink) == []


def test_a_source_tensor_without_a_place_is_an_error_whatever_else_is_constant():
    with pytest.raises(CoverageError) as caught:
        plan_refit(manifest("w", "cos"), both(manifest("w"), manifest("sin", feeding="constant")))
    assert caught.value.unmapped == ("cos",)
    assert caught.value.unfed == ()


def test_a_buffer_that_is_neither_fed_nor_declared_is_named():
    """Gemma-3's embedding normalizer under dummy loading: no checkpoint has it, and no loader ever writes it."""
    with pytest.raises(CoverageError, match=r"1 sink tensors that the source does not feed:\n  model\.normalizer\n"):
        plan_refit(manifest("model.embed"), manifest("model.embed", "model.normalizer"))


def test_names_that_a_wrapper_has_changed_are_answered_with_the_rename_that_helps():
    source = manifest("_orig_mod.a.weight", "_orig_mod.b.weight", "_orig_mod.b.bias")
    with pytest.raises(CoverageError) as caught:
        plan_refit(source, manifest("a.weight", "b.weight", "b.bias"))
    remedy = str(caught.value).splitlines()[-1]
    assert remedy == (
        "without '_orig_mod.' the names agree: ModuleSource(…, rename=lambda name: name.replace('_orig_mod.', ''))"
    )
