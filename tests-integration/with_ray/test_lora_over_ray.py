"""LoRA over real Ray: two FSDP2 ranks train the adapters; an engine in another process gets merged weights."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None or find_spec("peft") is None:
    pytest.skip("Ray or peft is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import json

import torch
from launched_run import LaunchedRun
from safetensors.torch import load_file

SHARE_OF_DIGITS = """
def score(completions, answer):
    return [sum(character.isdigit() for character in completion) / 9 for completion in completions]
"""
ADAPTERS = ["policy.dtensor_cfg.lora_cfg.rank=8", "policy.dtensor_cfg.lora_cfg.alpha=64"]
SHORT = [
    "sft=null",
    "env.reward=share.py:score",
    "grpo.max_num_steps=12",
    "grpo.optimizer={lr: 5.0e-3, warmup_steps: 0}",
    "grpo.objective.kl.weight=0.01",
    "evaluation.max_prompts=20",
    "evaluation.every=0",
]


@pytest.mark.slow
@pytest.mark.slow
def test_adapters_over_two_ranks_are_those_of_one_process_and_the_engine_has_them_merged(tmp_path):
    (tmp_path / "share.py").write_text(SHARE_OF_DIGITS)
    rows, adapters, model = {}, {}, {}
    for recipe in ("quickstart-ray", "quickstart"):
        run_dir = tmp_path / recipe
        run = LaunchedRun("run", recipe, *ADAPTERS, *SHORT, f"run_dir={run_dir}", run_dir=run_dir, cwd=tmp_path)
        try:
            assert run.end() == 0, run.output
        finally:
            run.close()
        rows[recipe] = run.rows()
        adapters[recipe] = load_file(run_dir / "adapter" / "adapter_model.safetensors")
        model[recipe] = load_file(run_dir / "model" / "model.safetensors")
        told = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
        assert (told["r"], told["lora_alpha"]) == (8, 64)
    over_ray, here = rows["quickstart-ray"], rows["quickstart"]
    assert all(row["token_mult_prob_error"] < 1.0001 for row in over_ray), "the engine holds what the trainer has"
    assert over_ray[0]["reward"] == here[0]["reward"], "the very same answers"
    assert over_ray[-1]["reward"] > over_ray[0]["reward"] + 0.02
    for name in ("loss", "grad_norm", "entropy"):
        assert over_ray[0][name] == pytest.approx(here[0][name], rel=1e-4, abs=1e-6), name
    assert adapters["quickstart-ray"].keys() == adapters["quickstart"].keys()
    for name, weight in adapters["quickstart-ray"].items():
        if ".lora_B." in name:
            matrix = adapters["quickstart-ray"][name.replace(".lora_B.", ".lora_A.")]
            layer = name.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
            merged = {key: adapters[key][name] @ adapters[key][name.replace("_B.", "_A.")] * 8.0 for key in adapters}
            base = {key: model[key][layer] - merged[key] for key in adapters}
            torch.testing.assert_close(base["quickstart-ray"], base["quickstart"], atol=1e-6, rtol=0)
            assert (weight @ matrix).abs().max() > 1e-4, name
