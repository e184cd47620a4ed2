"""Claims about runs that train adapters: what moves, what the engine gets, what is saved, and what is refused."""

import json
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from rl_backends import ModelError, OptimizerConfig
from rl_backends.lora.layers import adapters_disabled
from rl_launcher.build import build as building
from rl_launcher.build.models import load_policy
from rl_launcher.checks.explain import explain
from rl_launcher.cli import app
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import RecipeError, load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe

# peft 0.21 asks transformers 5.23 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ADAPTERS = ["policy.dtensor_cfg.lora_cfg.rank=4", "policy.dtensor_cfg.lora_cfg.alpha=16"]
LAYER = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Examples, as a backend reads them."""

    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


def resolve(recipe, *overrides):
    return load_recipe(recipe, schema=Recipe, overrides=[*ADAPTERS, *overrides])


def adapter(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_recipe):
    """The folder of a run to its end, SFT and GRPO, with a reference."""
    folder = tmp_path_factory.mktemp("lora")
    run(resolve(write_recipe(folder), "grpo.objective.kl.weight=0.01"))
    return folder


@pytest.fixture
def base(finished):
    """The model that the adapters were put into."""
    value = resolve(finished / "recipe.yaml").value
    return load_policy(value.policy, seed=value.seed)[0]


def test_adapters_learn_and_the_engine_is_the_policy(finished, curve):
    steps = curve(finished / "run")
    sft = [line["loss"] for line in steps if line["stage"] == "sft"]
    assert sft[-1] < sft[0] - 0.1
    errors = [line["token_mult_prob_error"] for line in steps if "token_mult_prob_error" in line]
    assert errors
    assert errors == pytest.approx([1.0] * len(errors), abs=1e-4)


def test_the_model_is_the_base_with_the_adapter_merged_and_nothing_else(finished, base):
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "run" / "model")
    weights, trained = adapter(finished / "run"), dict(model.named_parameters())
    changed = set()
    for name, parameter in base.named_parameters():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" not in weights:
            assert torch.equal(trained[name], parameter), name
            continue
        changed.add(name)
        delta = 4.0 * weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(trained[name] - parameter, delta, atol=1e-6, rtol=0)
        assert delta.abs().max() > 1e-4
    assert len(changed) == 7


def test_peft_opens_the_adapter_on_the_base_and_has_the_models_logits(finished, base):
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "run" / "model").eval()
    opened = peft.PeftModel.from_pretrained(base, finished / "run" / "adapter").eval()
    tokens = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(opened(tokens).logits, model(tokens).logits)
    told = json.loads((finished / "run" / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == f"{finished}/model.py:build"


@pytest.mark.parametrize(
    "stages",
    [pytest.param([], id="after-sft", marks=pytest.mark.slow), pytest.param(["sft=null"], id="from-the-base")],
)
def test_an_interrupted_run_goes_on_bit_for_bit(recipe, tmp_path, monkeypatch, stop_after, curve, stages):
    asked = ["grpo.objective.kl.weight=0.1", "checkpointing.save_period=2", *stages]
    run(resolve(recipe, *asked, f"run_dir={tmp_path}/whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 8 - 5 * bool(stages))
        with pytest.raises(RunStoppedError, match="Continue with"):
            run(resolve(recipe, *asked, f"run_dir={tmp_path}/cut"))
    copies = (tmp_path / "cut" / "checkpoints" / "stage_start").exists()
    assert copies != bool(stages)  # the base is never lost, so that nothing is kept of it
    resume(tmp_path / "cut")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    whole, cut = adapter(tmp_path / "whole"), adapter(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_the_reference_of_a_first_stage_is_the_base_without_memory_of_its_own(recipe):
    from rl_launcher.run.stages.start_stage import _freeze

    parts = building.build(resolve(recipe, "sft=null").value)
    try:
        policy = parts.policy
        policy.start_training(OptimizerConfig(lr=0.1), num_steps=1)
        before = sum(1 for _ in policy.model.parameters())
        reference = _freeze(policy, of_base=True)
        assert sum(1 for _ in policy.model.parameters()) == before
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if ".lora_B." in name:
                    parameter.fill_(0.1)
        tokens = torch.tensor([[5, 6, 7, 8]])
        with adapters_disabled(policy.model):
            bare = policy.model(tokens).logits
        assert not torch.allclose(policy.model(tokens).logits, bare)
        rows = Rows(tokens=tokens, lengths=torch.tensor([4]), trainable=torch.tensor([[False, True, True, True]]))
        picked = bare.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        torch.testing.assert_close(reference.logp(rows)[:, 1:], picked)
    finally:
        parts.close()


def test_another_seed_begins_with_another_adapter(recipe, tmp_path):
    first = {}
    for seed in (0, 1):
        parts = building.build(resolve(recipe, f"seed={seed}").value)
        first[seed] = dict(parts.policy.model.named_parameters())[f"{LAYER}.lora_A.default.weight"].detach().clone()
        parts.close()
    assert not torch.equal(first[0], first[1])


def test_a_checkpoint_of_adapters_is_exported_merged(recipe, tmp_path):
    run(resolve(recipe, "grpo=null", "checkpointing.save_period=3", "checkpointing.ft_keep_latest_k=9"))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "6"])
    assert result.exit_code == 0, result.output
    exported, model = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "run/model"))
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], model[name]) for name in model)


def test_explain_counts_what_trains_and_the_state_of_that_alone(recipe):
    explained = explain(resolve(recipe, "sft=null", "grpo.objective.kl.weight=0.1", "grpo.optimizer.lr=1e-6"))
    text = " ".join(explained.text().split())
    assert "LoRA on 7 layers: 928 of " in text
    assert "the reference is the policy with its adapters off" in text
    assert "grpo.optimizer.lr=1e-06: a rate for all weights" in text
    assert explained.figures["trained_parameters"] == 928
    plain = load_recipe(recipe, schema=Recipe, overrides=["sft=null", "grpo.objective.kl.weight=0.1"])
    assert explained.figures["rank_peak_bytes"] < explain(plain).figures["rank_peak_bytes"]


def test_memory_and_disk_are_those_of_frozen_weights_and_of_what_trains(recipe, tmp_path):
    from rl_launcher.checks.preflight import check_disk, known_model, least_needed
    from rl_launcher.ray.placement import plan_placement

    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, vocab_size=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    value = resolve(
        recipe,
        f"policy.model_name={tmp_path}/model",
        "policy.dtensor_cfg.lora_cfg.base_dtype=bfloat16",
        "grpo.objective.kl.weight=0.1",
        "sft=null",
    ).value
    model = known_model(value.policy)
    size = model.adapters
    assert size.trainable == 2 * 4 * 7 * (64 + 64)  # layers, rank, linear layers of 64 x 64
    needs = least_needed(value, model=model, placement=plan_placement(value))
    assert needs.trainer_bytes == size.frozen_bytes + 16 * size.trainable + size.merged_bytes
    assert size.merged_bytes == 2 * 7 * 64 * 64 * 2
    assert needs.frozen_bytes == 0
    with pytest.raises(Refusal, match="free"):
        check_disk(value, model=model, free_bytes=0)
    check_disk(value, model=model, free_bytes=2 * size.frozen_bytes + 4 * model.parameters + 24 * size.trainable)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.dtensor_cfg.lora_cfg.target_modules=[q_prj]", "policy.dtensor_cfg.lora_cfg.target_modules: 'q_prj'"),
        ("policy.dtensor_cfg.lora_cfg.target_modules=[lm_head]", "an adapter of one of them would make two of it"),
    ],
)
def test_modules_that_are_not_there_are_refused_by_their_key_before_anything_is_written(
    recipe, tmp_path, change, message
):
    with pytest.raises(ValueError, match="target_modules") as refused:
        run(resolve(recipe, change))
    assert message in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.megatron_cfg.enabled=true", "megatron_cfg.enabled=true and dtensor_cfg.lora_cfg"),
        ("policy.dtensor_cfg.lora_cfg.rank=0", "rank=0 must be >= 1"),
        ("policy.dtensor_cfg.lora_cfg.dropout=0.1", "unknown key"),
    ],
)
def test_what_adapters_cannot_be_is_refused_with_the_recipe(recipe, change, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, schema=Recipe, overrides=["policy.dtensor_cfg.lora_cfg.alpha=8", change])


def test_nemo_rls_word_for_the_rank_is_understood(recipe):
    asked = load_recipe(recipe, schema=Recipe, overrides=["policy.dtensor_cfg.lora_cfg.dim=3"]).value
    assert asked.policy.dtensor_cfg.lora_cfg.rank == 3


def test_the_disk_that_a_run_asks_for_is_not_more_than_its_checkpoints_take(recipe, tmp_path, monkeypatch):
    asked = []
    module = sys.modules["rl_launcher.run.run"]
    monkeypatch.setattr(module, "check_space", lambda *_, **needs: asked.append(needs["checkpoint_bytes"]))
    few = ["grpo=null", "sft.max_num_steps=2", "checkpointing.save_period=2"]
    run(resolve(recipe, *few))
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert 0 < asked[0] <= sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def test_a_missing_peft_is_told_under_the_key_before_any_weights_are_read(finished, monkeypatch):
    def missing():
        raise ModelError("LoRA needs peft, and it is not installed")

    monkeypatch.setattr("rl_backends.lora.inject.require_peft", missing)
    asked = resolve(finished / "recipe.yaml", f"policy.model_name={finished}/run/model")
    with pytest.raises(Refusal, match=r"policy\.dtensor_cfg\.lora_cfg: LoRA needs peft"):
        explain(asked)
