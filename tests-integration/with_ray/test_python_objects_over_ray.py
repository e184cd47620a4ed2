"""`rl_launcher.train` over Ray: rows, rewards and a model as Python objects, in the process that called it."""

import os
from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import torch

import rl_launcher
from rl_launcher.quickstart.tiny_model import build

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]


def test_objects_train_over_ray_and_the_model_object_stays_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    called_in = set()

    def score(completions, answer, **_):
        called_in.add(os.getpid())
        return [float(text == right) + len(text) / 9 for text, right in zip(completions, answer, strict=True)]

    model, tokenizer = build(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = rl_launcher.train(
        "quickstart-ray",
        model=model,
        tokenizer=tokenizer,
        data=ROWS,
        reward=score,
        run_dir=str(tmp_path / "run"),
        sft=None,
        policy={"generation": {"max_new_tokens": 3}},
        evaluation={"max_prompts": 2, "every": 0, "samples": 1},
        checkpointing={"save_period": 0},
        grpo={"max_num_steps": 2, "steps_per_generation": 1, "num_prompts": 8, "optimizer": {"warmup_steps": 1}},
    )
    assert called_in == {os.getpid()}
    assert result.summary["steps"] == 2
    assert (result.run_dir / "initial_model" / "config.json").is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in result.model.state_dict().items())
