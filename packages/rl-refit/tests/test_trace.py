"""Where an unmodified loader puts each box of a checkpoint, found by running it without data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl_refit import Layout, Manifest, RefitError, Region, TensorMeta
from rl_refit.tracing import trace

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


def test_an_engine_on_the_meta_device_is_traced_for_one_that_is_not():
    shape = Shape(up_first=True)
    with torch.device("meta"):
        empty = ToyEngine(shape)
    engine, loaded = ToyEngine(shape), ToyEngine(shape)
    loaded.load_weights(checkpoint(shape).items())
    apply(trace(empty.load_weights, empty, manifest(shape)).bindings(engine), checkpoint(shape))
    assert same_bits(bits(engine), bits(loaded))


def test_the_engine_keeps_its_own_values():
    shape = Shape()
    engine = ToyEngine(shape)
    engine.load_weights(checkpoint(shape, seed=3).items())
    before = bits(engine)
    trace(engine.load_weights, engine, manifest(shape))
    assert same_bits(bits(engine), before)
    assert engine.normalizer.item() == pytest.approx(shape.hidden**0.5)


def test_a_layer_can_be_traced_alone():
    shape = Shape(layers=2)
    engine = ToyEngine(shape)
    layer = Manifest(tuple(meta for meta in manifest(shape).tensors if ".layers.1." in meta.name))
    found = trace(engine.load_weights, engine, layer)
    assert all(name.startswith("layers.1.") for name in found.places)
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


CHANGES = [
    lambda w: w * 2,
    lambda w: -w,
    lambda w: w @ w.t(),
    lambda w: w.bfloat16() + 0.5,
    lambda w: w + torch.randn(()),
    lambda w: w.float().exp().log(),
    lambda w: w.maximum(w.flip(0)),
    lambda w: w.cumsum(0),
    lambda w: w.flip(0),
    lambda w: torch.cat([w[:2], w[1:3]]),
    lambda w: w[0].expand(4, 4),
    lambda w: w[:, ::2].repeat(1, 2),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_loader_that_computes_is_refused_by_name(change):
    engine = holding(plain=torch.zeros(4, 4), strange=torch.zeros(4, 4).bfloat16())

    def load(weights):
        for name, weight in weights:
            getattr(engine, name).copy_(weight if name == "plain" else change(weight))

    with pytest.raises(RefitError, match="hold what is no copy of a box of the checkpoint: strange;") as caught:
        trace(load, engine, metas(plain=(4, 4), strange=(4, 4)))
    assert caught.value.tensor == "strange"


def test_what_adds_to_old_values_is_no_copy():
    engine = holding(total=torch.ones(3))

    def load(weights):
        for name, weight in weights:
            getattr(engine, name).add_(weight)

    with pytest.raises(RefitError, match="no copy of a box of the checkpoint: total"):
        trace(load, engine, metas(total=(3,)))
    assert engine.total.tolist() == [1, 1, 1]


def test_two_tensors_for_one_place_are_refused():
    engine = holding(both=torch.zeros(2, 2))

    def load(weights):
        for name, weight in weights:
            engine.both[: 2 if name == "one" else 1].copy_(weight)

    with pytest.raises(RefitError, match="one and two are both written to both"):
        trace(load, engine, metas(one=(2, 2), two=(1, 2)))


def test_a_tensor_that_the_loader_computes_can_be_named_derived():
    engine = holding(plain=torch.zeros(3), decay=torch.zeros(3))

    def load(weights):
        for name, weight in weights:
            getattr(engine, name).copy_(-weight.exp() if name == "decay" else weight)

    with pytest.raises(RefitError, match="no copy of a box of the checkpoint: decay"):
        trace(load, engine, metas(plain=(3,), decay=(3,)))
    found = trace(load, engine, metas(plain=(3,), decay=(3,)), derived=["decay"])
    assert [binding.region.name for binding in found.bindings()] == ["plain"]
    with pytest.raises(ValueError, match="derived has 'missing'"):
        trace(load, engine, metas(decay=(3,)), derived=["missing"])


@pytest.mark.parametrize("constant", [0, 1, 0.5, float("nan")])
def test_what_the_loader_sets_by_itself_is_not_bound(constant):
    engine = holding(padded=torch.zeros(4, 2).bfloat16())

    def load(weights):
        for _, weight in weights:
            engine.padded[:3] = weight
            engine.padded[3:] = constant

    found = trace(load, engine, metas(padded=(3, 2)))
    assert [binding.region for binding in found.bindings()] == [Region("padded", (0, 0), (3, 2))]


@pytest.mark.parametrize(
    "store",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w.view(6, 1, 5, 1),
        lambda w: w[1:4],
        lambda w: w[1:4, 2:].t(),
        lambda w: w[2, 3],
        lambda w: w[:, 2],
    ],
)
def test_a_box_that_is_copied_in_any_form_is_bound(store):
    engine, values = holding(weight=torch.zeros_like(store(torch.zeros(6, 5)))), torch.randn(6, 5)
    found = trace(loader(engine, store), engine, metas(weight=(6, 5)))
    apply(found.bindings(), {"weight": values})
    assert torch.equal(engine.weight, store(values))
    assert len(found.bindings()) == 1


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


def test_a_loader_that_replaces_memory_is_refused_by_name():
    engine = nn.Linear(3, 2)

    def load(weights):
        engine.load_state_dict(dict(weights), assign=True)

    with pytest.raises(RefitError, match="replaces them by others: weight, bias"):
        trace(load, engine, metas(weight=(2, 3), bias=(2,)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8", "int64", "float8_e4m3fn"])
def test_casts_are_seen_through(dtype):
    engine = holding(weight=torch.zeros(4, 5).to(getattr(torch, dtype)))
    found = trace(loader(engine, lambda w: w), engine, metas("float32", weight=(4, 5)))
    assert [binding.region for binding in found.bindings()] == [Region("weight", (0, 0), (4, 5))]


def test_a_loader_that_asks_for_values_is_refused():
    engine = holding(weight=torch.zeros(2, 2))
    with pytest.raises(RefitError, match="asks for values of weight"):
        trace(loader(engine, lambda w: w[w > 0]), engine, metas(weight=(2, 2)))


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
