"""Recomputing activations: the same gradients, less memory, no other name, and no collective twice."""

import copy
import inspect

import pytest
import torch
import transformers
from parallel_plans_cases.cases import total_loss
from parallel_plans_cases.models import SHAPE, tiny, token_ids
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

import rl_parallel_plans as plans
from rl_parallel_plans.sharding.activation_checkpointing import HOOKS, apply_activation_checkpointing
from rl_parallel_plans.structure import fsdp_layers, stacked_layers
from rl_parallel_plans.styles.forward import wrap_forward

MODES = ["full", "selective"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
OTHERS = {
    "experts that add a bias in place": ("GptOssForCausalLM", "GptOssConfig", EXPERTS),
    "attention and state space": ("FalconH1ForCausalLM", "FalconH1Config", {**MAMBA, "mamba_n_groups": 1}),
}


def other(kind):
    model_class, config_class, changes = OTHERS[kind]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SHAPE, **changes}))


def gradients(model, ids):
    total_loss(model, ids).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, truth):
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
        return func(*args, **(kwargs or {}))


def held(model, ids):
    """Bytes that autograd holds between forward and backward, parameters left out; and the products of a step."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Products() as products, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total_loss(model, ids).backward()
    return sum(storages.values()), products.count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["qwen3", "phi3", "qwen3_moe"])
def test_gradients_are_those_without_it(mode, architecture):
    ids = token_ids(2, 9)
    truth = gradients(tiny(architecture), ids)
    assert_same(gradients(apply_activation_checkpointing(tiny(architecture), mode), ids), truth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OTHERS)
def test_gradients_of_other_layers_are_those_without_it(mode, kind):
    ids = token_ids(2, 9)
    truth = gradients(other(kind), ids)
    assert_same(gradients(apply_activation_checkpointing(other(kind), mode), ids), truth)


def test_selective_keeps_what_is_expensive_and_full_only_what_enters_a_layer():
    ids = token_ids(2, 33)
    model = tiny("llama", num_hidden_layers=4)
    _, products = held(model, ids)
    full, products_full = held(apply_activation_checkpointing(tiny("llama", num_hidden_layers=4), "full"), ids)
    _, products_selective = held(apply_activation_checkpointing(tiny("llama", num_hidden_layers=4), "selective"), ids)
    kept = held(model, ids)[0]
    assert full < 0.5 * kept
    assert products_selective == products  # none is computed again
    # Seven a layer, and backward needs nothing after the last one that has a weight's gradient: it stops there.
    assert products + 4 * 6 <= products_full <= products + 4 * 7


@pytest.mark.skipif(not HOOKS, reason="before torch 2.15 selective checkpointing keeps tensors past the caller's hooks")
def test_what_selective_keeps_goes_through_the_callers_hooks_and_gradients_stay():
    ids = token_ids(2, 9)
    plain, model = tiny("llama"), apply_activation_checkpointing(tiny("llama"), "selective")
    plain(input_ids=ids).logits.square().mean().backward()
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids).logits.square().mean()
    loss.backward()
    width = plain.config.intermediate_size
    assert sum(shape[-1] == width for shape in packed) >= 2 * plain.config.num_hidden_layers  # gate and up projections
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.parametrize("mode", MODES)
def test_names_stay_and_plans_still_match(mode):
    model = tiny("qwen3")
    names = [name for name, _ in model.named_modules()]
    explained = plans.plan_for(model, tp=2).explain()
    apply_activation_checkpointing(model, mode)
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == list(tiny("qwen3").state_dict())
    assert plans.plan_for(model, tp=2).explain() == explained


def test_copy_of_a_model_recomputes_with_its_own_parameters():
    ids = token_ids(2, 9)
    copied = copy.deepcopy(apply_activation_checkpointing(tiny("llama"), "full"))
    with torch.no_grad():
        copied.model.layers[0].mlp.up_proj.weight.mul_(2)
    changed = tiny("llama")
    with torch.no_grad():
        changed.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert_same(gradients(copied, ids), gradients(changed, ids))


def test_empty_cache_is_not_filled_twice_and_a_full_one_is_refused():
    ids = token_ids(2, 9)
    model = apply_activation_checkpointing(tiny("llama"), "full")
    truth = gradients(tiny("llama"), ids)
    logits = model(input_ids=ids, use_cache=True).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, truth)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    assert cache.get_seq_length() == 9  # nothing is recorded there, and the cache works
    with pytest.raises(plans.PlanError, match="holds tokens while a gradient is recorded"):
        model(input_ids=ids, **{name: cache})


def test_what_would_recompute_twice_is_refused():
    model = tiny("llama")
    with pytest.raises(plans.PlanError, match='activation checkpointing is \'layers\': it is "full" or "selective"'):
        apply_activation_checkpointing(model, "layers")
    with pytest.raises(plans.PlanError, match=r"Linear holds no nn\.ModuleList of layers to recompute"):
        apply_activation_checkpointing(nn.Linear(2, 2), "full")
    new = hasattr(model, "activation_checkpointing_enable")  # the name of both since transformers 5.23
    getattr(model, "activation_checkpointing_enable" if new else "gradient_checkpointing_enable")()
    with pytest.raises(plans.PlanError, match="LlamaForCausalLM checkpoints its activations itself"):
        apply_activation_checkpointing(model, "full")
    getattr(model, "activation_checkpointing_disable" if new else "gradient_checkpointing_disable")()
    apply_activation_checkpointing(model, "full")
    with pytest.raises(plans.PlanError, match="checkpoints its activations already"):
        apply_activation_checkpointing(model, "selective")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_over_ranks_are_those_of_one_process_and_selective_repeats_no_collective(ranks, sequence_parallel):
    counts = []
    for mode in (None, *MODES):
        results = ranks("fsdp:recomputed", 2, mode=mode, sequence_parallel=sequence_parallel)
        assert max(max(result["gradient_errors"].values()) for result in results) < 1e-5
        counts.append(results[0]["collectives"])
    plain, full, selective = counts
    assert selective == plain < full


# -- Layers ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of two parts and a list of experts."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))


def test_layers_are_the_outermost_and_lists_of_leaves_are_none():
    model = nn.ModuleDict(
        {
            "vision": nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])}),
            "text": nn.ModuleDict({"layers": nn.ModuleList([Block()])}),
            "stages": nn.ModuleList([nn.ModuleList([Block()])]),
            "heads": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        }
    )
    assert list(stacked_layers(model)) == ["vision.blocks.0", "vision.blocks.1", "text.layers.0", "stages.0.0"]


def test_layers_that_share_parameters_are_no_fsdp_units():
    shared, layers = nn.Linear(4, 4), nn.ModuleList([Block(), Block(), Block(), Block()])
    layers[0].shared = layers[1].shared = shared
    embedding = nn.Linear(4, 4)
    layers[2].mlp.weight = embedding.weight
    model = nn.ModuleDict({"layers": layers, "embedding": embedding})
    assert list(stacked_layers(model)) == [f"layers.{i}" for i in range(4)]
    assert list(fsdp_layers(model)) == ["layers.3"]


def test_layer_that_is_listed_twice_is_one_unit():
    block = Block()
    model = nn.ModuleDict({"layers": nn.ModuleList([block, block]), "alias": nn.ModuleList([block])})
    assert list(fsdp_layers(model)) == ["layers.0"]


def test_wrapped_layers_are_layers():
    model = nn.ModuleDict({"layers": nn.ModuleList([checkpoint_wrapper(Block())])})
    assert list(fsdp_layers(model)) == ["layers.0"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_a_plan_puts_around_a_layer_is_recomputed_with_it_in_either_order(order):
    """A wrapper may put tensors in place of parameters: a layer that is run again without it would read others."""
    model, ids = tiny("llama"), token_ids(2, 12)
    truth = gradients(tiny("llama"), ids)
    calls = []

    def noting(_module, call, *args, **kwargs):
        calls.append("wrapper")
        return call(*args, **kwargs)

    if order == "before":
        apply_activation_checkpointing(model, "full")
    for layer in model.model.layers:
        wrap_forward(layer, noting)
    if order == "after":
        apply_activation_checkpointing(model, "full")
    assert_same(gradients(model, ids), truth)
    assert len(calls) == 2 * len(model.model.layers)
    with pytest.raises(plans.PlanError, match="checkpoints its activations already"):
        apply_activation_checkpointing(model, "full")
