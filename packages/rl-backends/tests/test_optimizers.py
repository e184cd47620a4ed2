"""Claims about optimizers on one process: torch's own numbers, documented groups, steps that are whole or none."""

import dataclasses
import importlib.util
import json

import pytest
import torch
from torch import nn

from rl_backends.errors import CheckpointError, ModelError, NonFiniteGradientError
from rl_backends.metrics.memory import memory_by_category
from rl_backends.optimizers.config import MuonConfig, OptimizerConfig
from rl_backends.optimizers.optimizers import clip_and_step, make_optimizers

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def give_gradients(model, *, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run(model, config, *, num_steps=3):
    optimizers = make_optimizers(model, config, num_steps=num_steps)
    return optimizers, [_step(model, optimizers, number) for number in range(num_steps)]


def _step(model, optimizers, number):
    give_gradients(model, seed=number)
    return clip_and_step(model, optimizers, version=number)


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_steps_are_those_of_torchs_adamw_bit_for_bit(world, implementation):
    model, plain = world.make_model("Qwen3"), world.make_model("Qwen3")
    config = OptimizerConfig(**ADAMW, implementation=implementation, warmup_steps=2, final_lr_ratio=0.5)
    optimizers, steps = run(model, config, num_steps=4)
    matrices = [parameter for parameter in plain.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim <= 1]
    torchs = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        **ADAMW,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(torchs, [0.5, 1.0, 1.0, 0.5, 0.5].__getitem__)
    for step in range(4):
        give_gradients(plain, seed=step)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert steps[step].norm == pytest.approx(norm.item(), rel=1e-6)
        assert (steps[step].clipped, steps[step].skipped) == (True, False)
        torchs.step()
        schedule.step()
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=1e-6, atol=1e-7)
    assert optimizers.learning_rate == 0.5e-2


def test_without_clipping_weights_are_equal_in_every_bit(world):
    model, plain = world.make_model("Llama"), world.make_model("Llama")
    _, steps = run(model, OptimizerConfig(**ADAMW, max_grad_norm=None, decay_vectors=True))
    torchs = torch.optim.AdamW(plain.parameters(), **ADAMW, fused=True)
    for step in range(3):
        give_gradients(plain, seed=step)
        torchs.step()
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=0)
    assert not any(step.clipped for step in steps)


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_muon_bit_for_bit_on_the_matrices_of_layers(world, adjust_lr_fn, nesterov):
    model, plain = world.make_model("Qwen3"), world.make_model("Qwen3")
    muon = MuonConfig(momentum=0.9, adjust_lr_fn=adjust_lr_fn, nesterov=nesterov, adamw_lr_ratio=0.1)
    run(model, OptimizerConfig(**ADAMW, max_grad_norm=None, name="muon", muon=muon))
    matrices = [p for name, p in plain.named_parameters() if ".layers." in name and p.ndim == 2]
    tables = [plain.model.embed_tokens.weight, plain.lm_head.weight]
    vectors = [parameter for parameter in plain.parameters() if parameter.ndim == 1]
    torchs = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    rest = [{"params": tables}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, **{**ADAMW, "lr": 1e-3}, fused=True)
    for step in range(3):
        give_gradients(plain, seed=step)
        torchs.step()
        adamw.step()
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=0)


def test_an_orthogonalized_matrix_has_singular_values_near_one():
    from rl_backends.optimizers.muon import orthogonalized

    stack = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(stack, dtype=torch.float32)
    assert 0.6 < torch.linalg.svdvals(found).min() <= torch.linalg.svdvals(found).max() < 1.3
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(found.flatten(1), (left @ right).flatten(1)).min() > 0.97


class Oddities(nn.Module):
    """What a rule that looks at shapes alone gets wrong."""

    def __init__(self):
        super().__init__()
        layer = nn.ModuleDict({"up": nn.Linear(4, 6), "positions": nn.Embedding(5, 4), "conv": nn.Conv1d(3, 3, 2)})
        layer["experts"] = Experts()
        layer["head_norm"] = HeadRMSNorm()
        self.layers = nn.ModuleList([layer])
        self.head = nn.Linear(4, 2, bias=False)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 4, 6))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 6))


class HeadRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


def test_groups_go_by_what_a_parameter_is_and_not_by_its_shape():
    optimizers = make_optimizers(Oddities(), OptimizerConfig(lr=1e-2, name="muon"), num_steps=2)
    found = {(group.trained_by, group.decays): {each.name for each in group.shards} for group in optimizers.groups}
    assert found == {
        ("muon", True): {"layers.0.up.weight", "layers.0.experts.gate_up_proj"},
        ("adamw", True): {"layers.0.positions.weight", "layers.0.conv.weight", "head.weight"},
        ("adamw", False): {
            "layers.0.up.bias",
            "layers.0.conv.bias",
            "layers.0.experts.gate_up_proj_bias",
            "layers.0.head_norm.weight",
        },
    }


def test_patterns_and_decay_vectors_say_what_decays(world):
    model = world.make_model("Qwen2", tie_word_embeddings=True)  # it has biases
    spared = make_optimizers(model, OptimizerConfig(lr=1.0, no_decay=("*embed_tokens*", "*.1.mlp.*")), num_steps=2)
    decaying = {each.name for group in spared.groups if group.decays for each in group.shards}
    assert decaying == {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and "embed_tokens" not in name and ".1.mlp." not in name
    }
    everything = make_optimizers(model, OptimizerConfig(lr=1.0, decay_vectors=True), num_steps=2)
    assert [group.decays for group in everything.groups] == [True]
    assert set(everything.named_parameters) == {name for name, _ in model.named_parameters()}  # a tie counts once


def test_a_pattern_that_matches_nothing_is_refused(world):
    with pytest.raises(
        ValueError, match=r"no_decay pattern 'embed_tokens' matches none of the 25 trainable parameters"
    ):
        make_optimizers(world.make_model("Qwen3"), OptimizerConfig(lr=1.0, no_decay=("embed_tokens",)), num_steps=2)


def test_frozen_parameters_are_left_out_and_nothing_trainable_is_an_error(world):
    model = world.make_model("Llama").requires_grad_(False)
    with pytest.raises(ModelError, match=r"none of the 21 parameters of LlamaForCausalLM requires a gradient"):
        make_optimizers(model, OptimizerConfig(lr=1.0), num_steps=2)
    model.model.norm.weight.requires_grad_(True)
    assert list(make_optimizers(model, OptimizerConfig(lr=1.0), num_steps=2).named_parameters) == ["model.norm.weight"]
    with pytest.raises(ValueError, match="LlamaForCausalLM has no trainable matrix inside a layer"):
        make_optimizers(model, OptimizerConfig(lr=1.0, name="muon"), num_steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 4}, r"warmup_steps=4 must be less than the 4 steps"),
        (
            {"schedule": "wsd", "warmup_steps": 2, "decay_steps": 3, "final_lr_ratio": 0.0},
            r"warmup_steps=2 and decay_steps=3 together must be at most the 4 steps",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_into_the_stage_is_refused(world, options, message):
    with pytest.raises(ValueError, match=message):
        make_optimizers(world.make_model("Llama"), OptimizerConfig(lr=1.0, **options), num_steps=4)


def test_an_implementation_that_torch_does_not_have_there_is_refused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"no implementation='fused' of AdamW for torch\.complex64 on cpu"):
        make_optimizers(model, OptimizerConfig(lr=1.0), num_steps=2)
    assert make_optimizers(model, OptimizerConfig(lr=1.0, implementation="foreach"), num_steps=2).groups


def test_settings_of_muon_are_refused_without_it():
    with pytest.raises(ValueError, match=r"MuonConfig\(momentum=0\.5.*the optimizer is name='adamw': set name='muon'"):
        OptimizerConfig(lr=1.0, muon=MuonConfig(momentum=0.5))
    with pytest.raises(ValueError, match=r"momentum=1\.0 must be in"):
        MuonConfig(momentum=1.0)
    with pytest.raises(ValueError, match=r"adamw_lr_ratio=0\.0 must be > 0"):
        MuonConfig(adamw_lr_ratio=0.0)


def test_a_stage_goes_on_where_its_state_was_taken(world):
    config = OptimizerConfig(**ADAMW, schedule="cosine", final_lr_ratio=0.1)
    whole, resumed = world.make_model("Llama"), world.make_model("Llama")
    run(whole, config, num_steps=4)
    first = make_optimizers(resumed, config, num_steps=4)
    _step(resumed, first, 0)
    _step(resumed, first, 1)
    state = json.loads(json.dumps(first.schedule_state()))
    second = make_optimizers(resumed, config, num_steps=4)
    second.load_schedule_state(state)
    for old, new in zip(first.each, second.each, strict=True):
        new.load_state_dict(old.state_dict())
    assert second.learning_rate == first.learning_rate
    _step(resumed, second, 2)
    _step(resumed, second, 3)
    torch.testing.assert_close(weights_of(resumed), weights_of(whole), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"num_steps_taken": 1}, "is no state of a schedule"),
        ({"num_steps_taken": -1, "num_steps_skipped": 0}, "is no state of a schedule"),
        ({"num_steps_taken": 5, "num_steps_skipped": 0}, "has taken 5 steps, and this stage has 4"),
    ],
)
def test_a_foreign_schedule_state_is_refused(world, state, message):
    optimizers = make_optimizers(world.make_model("Llama"), OptimizerConfig(lr=1.0), num_steps=4)
    with pytest.raises(CheckpointError, match=message):
        optimizers.load_schedule_state(state)
    assert optimizers.num_steps_taken == 0


def test_a_gradient_that_is_not_finite_is_skipped_whole_and_counted(world):
    model = world.make_model("Llama")
    config = OptimizerConfig(**ADAMW, final_lr_ratio=0.0, on_nonfinite_gradient="skip")
    optimizers = make_optimizers(model, config, num_steps=3)
    _step(model, optimizers, 0)
    weights, state = weights_of(model), _state_of(optimizers)
    give_gradients(model, seed=1)
    names = [name for name, _ in model.named_parameters()]
    for name in names[3:10]:
        model.get_parameter(name).grad.flatten()[-1] = torch.inf
    step = clip_and_step(model, optimizers, version=1)
    assert (step.skipped, step.clipped, step.nonfinite) == (True, False, tuple(names[3:8]))
    assert step.norm == torch.inf
    torch.testing.assert_close(weights_of(model), weights, rtol=0, atol=0)
    torch.testing.assert_close(_state_of(optimizers), state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizers.schedule_state() == {"num_steps_taken": 1, "num_steps_skipped": 1}
    assert optimizers.learning_rate == 0.5e-2


def _state_of(optimizers):
    return [
        {name: value.clone() for name, value in state.items()}
        for optimizer in optimizers.each
        for state in optimizer.state.values()
    ]


def test_an_error_names_the_step_and_the_parameters(world):
    model, config = world.make_model("Llama"), OptimizerConfig(lr=1.0)
    optimizers = make_optimizers(model, config, num_steps=3)
    give_gradients(model, seed=0)
    model.lm_head.weight.grad[0, 0] = torch.nan
    with pytest.raises(
        NonFiniteGradientError, match=r"step 8 is nan: .*in 1 parameters \(lm_head\.weight\)\. .* after step 7"
    ):
        clip_and_step(model, optimizers, version=7)
    assert all(parameter.grad is None for parameter in model.parameters())
    give_gradients(model, seed=0, scale=1e25)
    with pytest.raises(NonFiniteGradientError, match=r"is inf: .*in the norm alone and in no parameter"):
        clip_and_step(model, optimizers, version=7)


def test_a_step_without_a_gradient_is_an_error(world):
    model, config = world.make_model("Llama"), OptimizerConfig(lr=1.0)
    with pytest.raises(RuntimeError, match="there is no gradient to step along"):
        clip_and_step(model, make_optimizers(model, config, num_steps=1), version=0)


def test_a_parameter_without_a_gradient_stays_as_it_is(world):
    model, config = world.make_model("Llama"), OptimizerConfig(lr=1.0, weight_decay=0.5)
    optimizers = make_optimizers(model, config, num_steps=1)
    before = weights_of(model)
    give_gradients(model, seed=0)
    model.lm_head.weight.grad = None
    clip_and_step(model, optimizers, version=0)
    after = weights_of(model)
    assert {name for name in after if torch.equal(after[name], before[name])} == {"lm_head.weight"}


def test_explain_tells_groups(world):
    model = world.make_model("Llama")
    config = OptimizerConfig(lr=1e-3, name="muon", weight_decay=0.1, warmup_steps=1, final_lr_ratio=0.1)
    optimizers = make_optimizers(model, config, num_steps=3)
    text = optimizers.explain()
    assert "Muon, lr=0.001, 1 steps of warm-up, then linear to 0.0001, 3 steps in all" in text
    assert "model.layers.0.self_attn.q_proj.weight" in text
    assert f"{sum(parameter.numel() for parameter in model.model.layers.parameters() if parameter.ndim > 1):,}" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "AdamW (fused), lr=0.5, constant, 9 steps in all"),
        ({"schedule": "cosine", "final_lr_ratio": 0.5}, "AdamW (fused), lr=0.5, cosine to 0.25, 9 steps in all"),
        (
            {"schedule": "wsd", "decay_steps": 2, "final_lr_ratio": 0.0},
            "AdamW (fused), lr=0.5, stable, over the last 2 steps down to 0, 9 steps in all",
        ),
    ],
)
def test_explain_tells_the_schedule(world, options, words):
    model, config = world.make_model("Llama"), OptimizerConfig(lr=0.5, **options)
    assert make_optimizers(model, config, num_steps=9).explain().startswith(f"{words}\n")


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao, of the extra 8bit, is not installed")
def test_8_bits_take_nearly_the_steps_of_adamw(world):
    eight = OptimizerConfig(**ADAMW, name="adamw_8bit", final_lr_ratio=0.1)
    model, plain = (world.make_model("Llama", vocab_size=256) for _ in range(2))
    of_32_bits, _ = run(plain, dataclasses.replace(eight, name="adamw"))
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, a minute for every shape
        of_8_bits, _ = run(model, eight)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=0.3e-2)
    assert not torch.equal(model.lm_head.weight, plain.lm_head.weight)
    held = [
        memory_by_category(trained, optimizers.each).category("optimizer state")
        for trained, optimizers in ((model, of_8_bits), (plain, of_32_bits))
    ]
    assert 0 < held[0] < held[1]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_8_bits_without_torchao_say_what_to_install(world):
    with pytest.raises(ImportError, match=r"pip install 'rl-backends\[8bit\]'"):
        make_optimizers(world.make_model("Llama"), OptimizerConfig(lr=1.0, name="adamw_8bit"), num_steps=1)
