"""Bindings of fused storage against what the loader of an engine with such storage does, and against arithmetic."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_refit import CoverageError, ModuleSink, ModuleSource, Refit, plan_refit
from rl_refit.fused import (
    fused_gate_up,
    fused_qkv,
    mixtral_bindings,
    mixtral_name,
    padded_vocabulary,
    sharded,
    stacked_experts,
)
from rl_refit.tracing import trace

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from toy_engine import HuggingFace, ToyEngine, checkpoint, manifest
from toy_engine import Shape as AnyShape

Shape = partial(AnyShape, transposed=False)  # transposed storage has no function, and is traced


def bindings_of(engine, *, tp=1, rank=0, ep=False):
    """All of a toy engine's storage, said with the functions under test."""
    shape, slices = engine.shape, {"tp_rank": rank, "tp_size": tp}
    yield from padded_vocabulary(
        engine.embed.weight, "model.embed_tokens.weight", vocabulary_size=shape.vocabulary, **slices
    )
    yield from sharded(engine.norm.weight, "model.norm.weight", dim=None)
    heads = {"num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    halves = "up_gate" if shape.up_first else "gate_up"
    for number, layer in enumerate(engine.layers):
        prefix = f"model.layers.{number}."
        for kind in ("weight", "bias"):
            names = tuple(f"{prefix}self_attn.{letter}_proj.{kind}" for letter in "qkv")
            order = "by_group" if shape.megatron else "q_k_v"
            yield from fused_qkv(getattr(layer.self_attn.qkv_proj, kind), names, order=order, **heads, **slices)
        yield from sharded(layer.self_attn.o_proj.weight, f"{prefix}self_attn.o_proj.weight", dim=1, **slices)
        names = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
        yield from fused_gate_up(layer.mlp.gate_up_proj.weight, names, order=halves, **slices)
        yield from sharded(layer.mlp.down_proj.weight, f"{prefix}mlp.down_proj.weight", dim=1, **slices)
        experts = [f"{prefix}experts.{expert}." for expert in range(shape.experts)]
        spread = {"ep_rank": rank, "ep_size": tp} if ep else slices
        pairs = [(f"{expert}gate_proj.weight", f"{expert}up_proj.weight") for expert in experts]
        yield from stacked_experts(layer.experts.w13_weight, pairs, part="gate_up", order=halves, **spread)
        names = [f"{expert}down_proj.weight" for expert in experts]
        yield from stacked_experts(layer.experts.w2_weight, names, part="down", **spread)


def element_map(bindings):
    """Memory address → name and index of the checkpoint element that is bound there."""
    found = {}
    for binding in bindings:
        view = binding.tensor
        for index in torch.cartesian_prod(*(torch.arange(n) for n in view.shape)).reshape(view.numel(), view.dim()):
            place = index.tolist()
            address = view[tuple(place)].data_ptr()
            assert address not in found
            element = tuple(start + step for start, step in zip(binding.region.offsets, place, strict=True))
            found[address] = (binding.region.name, element, binding.shape)
    return found


def agree(shape, *, tp=1, rank=0, ep=False):
    engine = ToyEngine(shape, tp=tp, rank=rank, ep=ep)
    traced = trace(engine.load_weights, engine, manifest(shape))
    said = list(bindings_of(engine, tp=tp, rank=rank, ep=ep))
    assert element_map(said) == element_map(traced.bindings())


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_bindings_equal_the_traced_map_on_every_rank(tp, ep, megatron):
    shape = Shape(hidden=3, kv_heads=4 if megatron else 2, megatron=megatron, up_first=ep)
    for rank in range(tp):
        agree(shape, tp=tp, rank=rank, ep=ep)


@given(data=st.data())
@settings(max_examples=12)
def test_bindings_equal_the_traced_map_for_any_shape(data):
    tp = data.draw(st.sampled_from([1, 2, 4]))
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    shape = Shape(
        hidden=data.draw(st.integers(1, 4)),
        head_dim=data.draw(st.integers(1, 3)),
        heads=4 * data.draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        intermediate=tp * data.draw(st.integers(1, 3)),
        vocabulary=data.draw(st.integers(1, 9)),
        padding=data.draw(st.integers(1, 3)),
        expert_intermediate=tp * data.draw(st.integers(1, 2)),
        megatron=kv_heads % tp == 0 and data.draw(st.booleans()),
        up_first=data.draw(st.booleans()),
    )
    agree(shape, tp=tp, rank=data.draw(st.integers(0, tp - 1)), ep=data.draw(st.booleans()))


def test_key_and_value_heads_are_replicated_when_there_are_fewer_than_ranks():
    param = torch.zeros((4 + 2) * 2, 3)
    names, heads = ("q", "k", "v"), {"num_heads": 16, "num_kv_heads": 2, "head_dim": 2}
    rows = [
        [binding.region.offsets[0] for binding in fused_qkv(param, names, tp_rank=rank, tp_size=4, **heads)]
        for rank in range(4)
    ]
    assert rows == [[0, 0, 0], [8, 0, 0], [16, 2, 2], [24, 2, 2]]


@pytest.mark.parametrize(
    ("rows", "numbers", "complaint"),
    [
        (8, {"num_heads": 4, "num_kv_heads": 2, "tp_size": 3}, "must divide num_heads; got num_heads=4"),
        (8, {"num_heads": 6, "num_kv_heads": 3, "tp_size": 2}, "tp_size must divide num_kv_heads or be divided by it"),
        (6, {"num_heads": 4, "num_kv_heads": 2, "tp_size": 4, "order": "by_group"}, "must divide num_kv_heads with"),
        (7, {"num_heads": 2, "num_kv_heads": 1}, r"this rank holds 8 in dim 0, and the tensor is \[7, 3\]"),
        (8, {"num_heads": 2, "num_kv_heads": 1, "order": "kqv"}, "order='kqv' is neither"),
        (8, {"num_heads": 2, "num_kv_heads": 1, "tp_rank": 1}, "tp_rank must be at least 0 and less than tp_size"),
    ],
)
def test_heads_that_do_not_fit_are_refused(rows, numbers, complaint):
    with pytest.raises(ValueError, match=complaint):
        fused_qkv(torch.zeros(rows, 3), ("q", "k", "v"), head_dim=2, **numbers)


def test_storage_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="first dim is odd"):
        fused_gate_up(torch.zeros(5, 2), ("gate", "up"))
    with pytest.raises(ValueError, match="order='up' is neither"):
        fused_gate_up(torch.zeros(4, 2), ("gate", "up"), order="up")
    with pytest.raises(ValueError, match="vocabulary_size=9 rows, and tp_size=2 ranks of 4 rows hold 8"):
        padded_vocabulary(torch.zeros(4, 2), "embed", vocabulary_size=9, tp_size=2)
    with pytest.raises(ValueError, match="ep_size=2 must divide the 3 experts"):
        stacked_experts(torch.zeros(3, 2, 2), ["a", "b", "c"], part="down", ep_size=2)
    with pytest.raises(ValueError, match="part='down' needs a name an expert"):
        stacked_experts(torch.zeros(1, 2, 2), [("a", "b")], part="down")


CONSTANT = ("embed.weight", "lm_head.weight", "normalizer")


def bits(module):
    return {name: tensor.detach().clone().contiguous().view(torch.int16) for name, tensor in module.named_parameters()}


@pytest.mark.parametrize("way", ["said", "traced"])
def test_a_refit_gives_the_engine_what_its_own_loader_would(way):
    shape = Shape(layers=2, up_first=True)
    policy, engine, loaded = HuggingFace(checkpoint(shape)), ToyEngine(shape), ToyEngine(shape)
    loaded.load_weights(checkpoint(shape).items())
    traced = trace(engine.load_weights, engine, manifest(shape))
    bindings = traced.bindings if way == "traced" else bindings_of
    sink = ModuleSink(engine, bindings=bindings, constant=CONSTANT)
    report = Refit(ModuleSource(policy), sink)(version=1)
    assert report.version == 1
    assert all(torch.equal(tensor, bits(loaded)[name]) for name, tensor in bits(engine).items())
    assert engine.normalizer.item() == pytest.approx(shape.hidden**0.5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(checkpoint(shape, seed=1)[name])
    loaded.load_weights(checkpoint(shape, seed=1).items())
    Refit(ModuleSource(policy), sink)(version=2)
    assert all(torch.equal(tensor, bits(loaded)[name]) for name, tensor in bits(engine).items())


def test_a_buffer_that_nothing_feeds_is_named_before_the_first_byte():
    shape = Shape()
    policy, engine = HuggingFace(checkpoint(shape)), ToyEngine(shape)
    before = bits(engine)
    with pytest.raises(CoverageError) as caught:
        Refit(ModuleSource(policy), ModuleSink(engine, bindings=bindings_of, constant=CONSTANT[:2]))(version=1)
    assert caught.value.unfed == ("normalizer",)
    with pytest.raises(CoverageError, match=r"embed.weight: 8 of 96 elements"):
        Refit(ModuleSource(policy), ModuleSink(engine, bindings=bindings_of, constant=CONSTANT[2:]))(version=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(engine).items())


def test_a_rank_of_the_engine_is_planned_from_its_bindings():
    shape = Shape(hidden=4)
    engine = ToyEngine(shape, tp=2, rank=1)
    sink = ModuleSink(engine, bindings=lambda module: bindings_of(module, tp=2, rank=1), constant=CONSTANT)
    source = ModuleSource(HuggingFace(checkpoint(shape)))
    plan = plan_refit(source.manifest(), sink.prepare(source.manifest()).sink)
    fed = sum(parameter.numel() for parameter in engine.parameters()) - 5 * shape.hidden
    assert plan.bytes_received(0) == plan.lower_bound(0) == 2 * fed


def test_tp_ranks_together_hold_the_whole_checkpoint():
    shape = dataclasses.replace(Shape(), kv_heads=4)
    covered = set()
    for rank in range(4):
        engine = ToyEngine(shape, tp=4, rank=rank)
        covered |= {(name, index) for name, index, _ in element_map(bindings_of(engine, tp=4, rank=rank)).values()}
    assert len(covered) == sum(tensor.numel() for tensor in checkpoint(shape).values())


def test_mixtral_goes_under_the_names_and_with_the_values_of_its_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    policy = transformers.MixtralForCausalLM(config)
    policy.save_pretrained(tmp_path)  # under the names of the checkpoint
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    source = ModuleSource(policy, rename=mixtral_name, bindings=mixtral_bindings, exclude="*inv_freq")
    assert {meta.name for meta in source.manifest().tensors} == saved.keys()
    for region, tensor in source.shards(saved):
        box = tuple(slice(a, a + n) for a, n in zip(region.offsets, region.shape, strict=True))
        assert torch.equal(saved[region.name][box], tensor), region


def test_a_model_without_mixtrals_experts_is_told_so():
    with pytest.raises(ValueError, match=r"Linear has no mlp\.experts\.gate_up_proj"):
        list(mixtral_bindings(torch.nn.Linear(2, 2)))
