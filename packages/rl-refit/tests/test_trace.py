"""What an unmodified loader does with a checkpoint, found by running it on digits."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl_refit import Layout, Manifest, RefitError, Region, TensorMeta
from rl_refit.tracing import dye, trace

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from toy_engine import HuggingFace, Shape, ToyEngine, checkpoint, manifest

RANKS = [(1, 0, False), (2, 0, False), (2, 1, False), (4, 3, False), (2, 1, True), (4, 0, True)]


def bits(module):
    return {name: tensor.detach().clone().contiguous().view(torch.int16) for name, tensor in module.named_parameters()}


def same_bits(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def apply(bindings, tensors):
    for binding in bindings:
        whole = Region(binding.region.name, (0,) * len(binding.shape), binding.shape)
        assert tuple(tensors[whole.name].shape) == binding.shape
        with torch.no_grad():
            binding.tensor.copy_(tensors[whole.name][binding.region.index_within(whole)])


def metas(dtype="float32", **shapes):
    return Manifest(
        tuple(TensorMeta(name=name, shape=shape, dtype=dtype, layout=Layout.whole()) for name, shape in shapes.items())
    )


def holding(**buffers):
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize(("tp", "rank", "ep"), RANKS)
def test_the_bindings_do_what_the_loader_does_bit_for_bit(tp, rank, ep, megatron):
    shape = Shape(kv_heads=4 if megatron else 2, megatron=megatron, up_first=megatron, transposed=not megatron)
    engine, loaded = (ToyEngine(shape, tp=tp, rank=rank, ep=ep) for _ in range(2))
    loaded.load_weights(checkpoint(shape).items())
    apply(trace(engine.load_weights, engine, manifest(shape)).bindings(), checkpoint(shape))
    assert same_bits(bits(engine), bits(loaded))


@given(data=st.data())
@settings(max_examples=25)
def test_any_shape_of_engine_is_mapped_bit_for_bit(data):
    tp = data.draw(st.sampled_from([1, 2, 4]))
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    megatron = kv_heads % tp == 0 and data.draw(st.booleans())
    shape = Shape(
        hidden=data.draw(st.integers(1, 9)),
        head_dim=data.draw(st.integers(1, 3)),
        heads=4 * data.draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        intermediate=tp * data.draw(st.integers(1, 4)),
        vocabulary=data.draw(st.integers(1, 13)),
        padding=data.draw(st.integers(1, 4)),
        experts=4,
        expert_intermediate=tp * data.draw(st.integers(1, 3)),
        megatron=megatron,
        up_first=data.draw(st.booleans()),
        transposed=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float16])),
    )
    given = {"tp": tp, "rank": data.draw(st.integers(0, tp - 1)), "ep": data.draw(st.booleans())}
    engine, loaded = ToyEngine(shape, **given), ToyEngine(shape, **given)
    loaded.load_weights(checkpoint(shape).items())
    apply(trace(engine.load_weights, engine, manifest(shape)).bindings(), checkpoint(shape))
    assert same_bits(bits(engine), bits(loaded))


def test_the_fewest_boxes_are_found():
    shape = Shape(megatron=True)
    engine = ToyEngine(shape)
    pieces = trace(engine.load_weights, engine, manifest(shape)).pieces
    counts = {name: len(boxes) for name, (_, boxes) in pieces.items()}
    assert counts["layers.0.self_attn.qkv_proj.weight"] == 6  # q, k, v of two groups
    assert counts["layers.0.experts.w13_weight"] == 8
    assert counts["layers.0.experts.w2_weight"] == 4
    assert counts["embed.weight"] == 1


def test_the_engine_has_its_own_values_afterwards_also_after_an_error():
    shape = Shape()
    engine = ToyEngine(shape)
    engine.load_weights(checkpoint(shape, seed=3).items())
    before = bits(engine)
    trace(engine.load_weights, engine, manifest(shape))
    assert same_bits(bits(engine), before)
    assert engine.normalizer.item() == pytest.approx(shape.hidden**0.5)

    def fail(weights):
        engine.load_weights(weights)
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        trace(fail, engine, manifest(shape))
    assert same_bits(bits(engine), before)


def test_a_layer_can_be_traced_alone():
    shape = Shape(layers=2)
    engine = ToyEngine(shape)
    layer = Manifest(tuple(meta for meta in manifest(shape).tensors if ".layers.1." in meta.name))
    found = trace(engine.load_weights, engine, layer)
    assert all(name.startswith("layers.1.") for name in found.pieces)
    assert {binding.region.name for binding in found.bindings()} == set(layer.by_name)


def test_bindings_can_be_of_another_module_of_the_same_form():
    shape = Shape()
    engine, other, loaded = (ToyEngine(shape) for _ in range(3))
    found = trace(engine.load_weights, engine, manifest(shape))
    loaded.load_weights(checkpoint(shape).items())
    apply(found.bindings(other), checkpoint(shape))
    assert same_bits(bits(other), bits(loaded))
    with pytest.raises(RefitError, match=r"'embed.weight' has shape \[16, 8\] .* traced with shape \[12, 8\]"):
        found.bindings(ToyEngine(Shape(vocabulary=16)))


def loader(engine, change):
    def load(weights):
        for name, weight in weights:
            target = getattr(engine, name)
            target.copy_(change(weight))

    return load


CHANGES_ONE = [
    lambda w: w * 2,
    lambda w: w / 2,
    lambda w: -w,
    lambda w: w + 1,
    lambda w: w @ w.t(),
    lambda w: w.bfloat16() + 0.5,
    lambda w: w + torch.randn(()),
    lambda w: 257 - w,
]
CHANGES_SEVERAL = [
    lambda w: w.float().exp().log(),
    lambda w: (w + w.flip(0)) / 2,
    lambda w: w.maximum(w.flip(0)),
    lambda w: w.cumsum(0),
    lambda w: w.remainder(16),
]


@pytest.mark.parametrize(
    ("change", "size"),
    [(change, size) for change in CHANGES_ONE for size in (1, 2, 20)]
    + [(change, size) for change in CHANGES_SEVERAL for size in (3, 20)],
)
def test_a_loader_that_computes_is_refused_by_name(change, size):
    engine = holding(plain=torch.zeros(size, size), strange=torch.zeros(size, size).bfloat16())

    def load(weights):
        for name, weight in weights:
            getattr(engine, name).copy_(weight if name == "plain" else change(weight))

    with pytest.raises(RefitError, match="hold values that are no element") as caught:
        trace(load, engine, metas(plain=(size, size), strange=(size, size)))
    assert caught.value.tensor == "strange"
    assert "plain" not in str(caught.value)


def test_what_adds_to_old_values_is_no_copy():
    engine = holding(total=torch.ones(3))

    def load(weights):
        for name, weight in weights:
            getattr(engine, name).add_(weight)

    with pytest.raises(RefitError, match=r"total: 3 of 3 elements, the first at \[0\]"):
        trace(load, engine, metas(total=(3,)))
    assert engine.total.tolist() == [1, 1, 1]


def test_a_tensor_that_the_loader_computes_can_be_named_derived():
    engine = holding(plain=torch.zeros(3), decay=torch.zeros(3))
    load = loader(engine, lambda w: -w.exp())
    with pytest.raises(RefitError, match=r"\n  plain: .*\n  decay: "):
        trace(load, engine, metas(plain=(3,), decay=(3,)))
    with pytest.raises(RefitError, match="these tensors of the engine hold values"):
        trace(load, engine, metas(plain=(3,), decay=(3,)), derived=["decay"])
    found = trace(load, engine, metas(decay=(3,)), derived=["decay"])
    assert found.bindings() == []
    with pytest.raises(ValueError, match="derived has 'missing'"):
        trace(load, engine, metas(decay=(3,)), derived=["missing"])


@pytest.mark.parametrize("constant", [0, 1, 2, 255, -1, -2, 0.5, float("nan")])
def test_what_the_loader_sets_by_itself_is_not_bound(constant):
    engine = holding(padded=torch.zeros(4, 2).bfloat16())

    def load(weights):
        for _, weight in weights:
            engine.padded[:3] = weight
            engine.padded[3:] = constant

    if math.isnan(constant):
        with pytest.raises(RefitError, match=r"padded: 2 of 8 elements, the first at \[3, 0\]"):
            trace(load, engine, metas(padded=(3, 2)))
        return
    found = trace(load, engine, metas(padded=(3, 2)))
    assert [binding.region for binding in found.bindings()] == [Region("padded", (0, 0), (3, 2))]


@pytest.mark.parametrize(
    ("store", "boxes"),
    [
        (lambda w: w, 1),
        (lambda w: w.t().contiguous(), 1),
        (lambda w: w.flatten(), 1),
        (lambda w: w.view(2, 3, 5), 1),
        (lambda w: w.view(6, 1, 5, 1), 1),
        (lambda w: w.view(2, 3, 5).transpose(0, 1).contiguous(), 2),  # every second row of three
        (lambda w: w.flip(0), 6),
        (lambda w: w[[3, 0, 1, 2, 5, 4]], 3),
        (lambda w: w[:, ::2].contiguous(), 3),
        (lambda w: torch.cat([w[:2], w[1:3]]), 3),  # the row that is there twice makes one box more than needed
        (lambda w: w[0].expand(3, 5).contiguous(), 3),
        (lambda w: torch.cat([w[:3], w[3:]], dim=1), 2),
        (lambda w: torch.block_diag(w[:2], w[2:]), 2),
        (lambda w: w.flatten()[3:17], 3),  # the end of a row, whole rows, the start of one
        (lambda w: w[2, 3], 1),
    ],
)
def test_copies_of_any_form_become_boxes(store, boxes):
    engine, values = holding(weight=store(torch.zeros(6, 5))), torch.randn(6, 5)
    found = trace(loader(engine, store), engine, metas(weight=(6, 5)))
    apply(found.bindings(), {"weight": values})
    assert torch.equal(engine.weight, store(values))
    assert len(found.bindings()) == boxes


def test_memory_with_strides_of_its_own_is_bound_as_it_lies():
    base = torch.zeros(5, 12)
    engine = holding(turned=base[:, 2:8].t())
    found = trace(loader(engine, lambda w: w), engine, metas(turned=(6, 5)))
    (binding,) = found.bindings()
    assert binding.tensor.stride() == (1, 12)
    values = torch.randn(6, 5)
    apply([binding], {"turned": values})
    assert torch.equal(base[:, 2:8], values.t())
    assert base[:, 8:].count_nonzero() == 0


def test_neighbours_of_one_length_are_not_taken_for_one_tensor():
    names = {f"expert{number}": (2, 3) for number in range(4)}
    engine = holding(stack=torch.zeros(4, 2, 3))

    def load(weights):
        for name, weight in weights:
            engine.stack[int(name[-1])] = weight

    bindings = trace(load, engine, metas(**names)).bindings()
    assert [binding.region for binding in bindings] == [Region(name, (0, 0), (2, 3)) for name in names]


def test_a_scattering_loader_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(dye, "MAX_BOXES", 100)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    engine = holding(scattered=torch.zeros(400))
    with pytest.raises(RefitError, match=r"'scattered', of shape \[400\], is more than 100 boxes") as caught:
        trace(loader(engine, lambda w: w[order]), engine, metas(scattered=(400,)))
    assert caught.value.tensor == "scattered"


def test_a_loader_that_replaces_memory_is_refused_by_name():
    engine = nn.Linear(3, 2)

    def load(weights):
        engine.load_state_dict(dict(weights), assign=True)

    with pytest.raises(RefitError, match="replaces them by others: weight, bias"):
        trace(load, engine, metas(weight=(2, 3), bias=(2,)))


def test_a_loader_that_is_not_the_same_every_time_is_refused():
    engine, passes = holding(weight=torch.zeros(3)), []

    def load(weights):
        passes.append(len(passes))
        if passes[-1]:
            loader(engine, lambda w: w)(weights)

    with pytest.raises(RefitError, match="weight: 3 of 3 elements"):
        trace(load, engine, metas(weight=(3,)))


def test_dtypes_that_hold_few_integers_are_refused_only_where_they_matter():
    engine = holding(mask=torch.zeros(3, dtype=torch.bool), scale=torch.zeros(2).to(torch.float8_e4m3fn))
    assert trace(list, engine, metas(weight=(3,))).bindings() == []
    with pytest.raises(RefitError, match="dtype that holds too few integers to number elements with: scale"):
        trace(loader(engine, lambda w: w), engine, metas(scale=(2,)))
    with pytest.raises(RefitError, match=r"weight \(float8_e4m3fn\)"):
        trace(list, engine, metas("float8_e4m3fn", weight=(3,)))


@pytest.mark.parametrize(
    ("dtype", "passes"), [("bfloat16", 4), ("float16", 3), ("float32", 3), ("uint8", 4), ("int64", 3)]
)
def test_wider_dtypes_need_fewer_passes_and_casts_are_seen_through(dtype, passes):
    engine, calls = holding(weight=torch.zeros(40, 50, dtype=getattr(torch, dtype))), []

    def load(weights):
        calls.append(1)
        loader(engine, lambda w: w)(weights)

    found = trace(load, engine, metas("float32", weight=(40, 50)))
    assert [binding.region for binding in found.bindings()] == [Region("weight", (0, 0), (40, 50))]
    assert len(calls) == passes


def test_tensors_that_cannot_be_read_back_are_refused():
    with pytest.raises(RefitError, match=r"'weight' is on the meta device .* use trace_writes"):
        trace(list, nn.Linear(2, 2, device="meta"), metas(weight=(2, 2)))
    with pytest.raises(RefitError, match="'mask' is expanded"):
        trace(list, holding(mask=torch.zeros(1).expand(3)), metas(weight=(2, 2)))


def test_tied_tensors_are_given_once():
    tied = TensorMeta(name="head", shape=(2, 3), dtype="float32", layout=Layout.whole(), tied_to="weight")
    engine, given = holding(weight=torch.zeros(2, 3)), []

    def load(weights):
        for name, weight in weights:
            given.append(name)
            engine.weight.copy_(weight)

    trace(load, engine, Manifest((*metas(weight=(2, 3)).tensors, tied)))
    assert set(given) == {"weight"}


def test_nothing_to_trace_is_no_error():
    found = trace(list, nn.Module(), Manifest(()))
    assert found.bindings() == []
    engine = holding(empty=torch.zeros(0, 3))
    assert trace(loader(engine, lambda w: w), engine, metas(empty=(0, 3))).bindings() == []


def test_a_hugging_face_module_is_mapped_to_itself():
    shape = Shape()
    module = HuggingFace(checkpoint(shape))
    found = trace(lambda weights: module.load_state_dict(dict(weights)), module, manifest(shape))
    assert [binding.region.shape for binding in found.bindings()] == [meta.shape for meta in manifest(shape).tensors]
