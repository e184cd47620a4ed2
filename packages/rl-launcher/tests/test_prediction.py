"""A run's own prediction: by the names of what it logs, beside the run, and never in its way."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_generation import estimate_memory
from rl_launcher.checks.gpu_budget import Lengths, gpu_named, step_times
from rl_launcher.ray.cluster import is_running
from rl_launcher.ray.placement import plan_placement
from rl_launcher.recipe_files import load_recipe
from rl_launcher.recipe_files.shipped import find_recipe
from rl_launcher.run import prediction
from rl_launcher.run import run as run_resolved
from rl_launcher.run.prediction import Question, lengths_of, named_gpu, prediction_of
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory

RUN = importlib.import_module("rl_launcher.run.run")
H100 = gpu_named("h100-80gb")
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4}
CONFIG = Qwen3Config(**SHAPE, vocab_size=32_000, hidden_size=512, intermediate_size=1024, max_position_embeddings=512)


@pytest.fixture(scope="module")
def skeleton():
    with torch.device("meta"):
        return Qwen3ForCausalLM(CONFIG)


@pytest.fixture
def predicting(monkeypatch):
    """Other tests of runs leave the prediction out, which takes longer than they do."""
    monkeypatch.setattr(RUN, "predict_in_background", prediction.predict_in_background)


@pytest.fixture
def waiting(predicting, monkeypatch):
    """A run of a second waits for its prediction."""
    monkeypatch.setattr(RUN, "WAIT_SHARE", 1e6)


def loaded(name, *overrides):
    return load_recipe(find_recipe(name), schema=Recipe, overrides=overrides).value


def times_of(skeleton, recipe, **options):
    engine = estimate_memory(CONFIG, dtype="bfloat16", max_model_len=512)
    return step_times(recipe, skeleton, plan_placement(recipe), gpu=H100, engine=engine, **options)


def test_recomputed_activations_take_one_more_forward_and_lower_the_mfu(skeleton):
    """Of three forwards' worth (one forward, two backward) they make four; the head is computed twice in any case."""
    key = "policy.dtensor_cfg.activation_checkpointing"
    plain = times_of(skeleton, loaded("grpo-8gpu-colocated", f"{key}=null"))
    full = times_of(skeleton, loaded("grpo-8gpu-colocated", f"{key}=full"))
    assert 1.1 < full.phases["train"] / plain.phases["train"] < 4 / 3
    assert full.mfu / plain.mfu == pytest.approx(plain.phases["train"] / full.phases["train"])
    assert full.phases["generate"] == plain.phases["generate"]
    assert any("activation recomputation" in each for each in full.assumed)
    assert not any("activation recomputation" in each for each in plain.assumed)


def test_longer_prompts_of_the_data_take_longer(skeleton):
    recipe = loaded("grpo-8gpu-colocated")
    short, long = (times_of(skeleton, recipe, lengths=Lengths(prompt=tokens)) for tokens in (64, 1024))
    assert long.phases["train"] > 1.5 * short.phases["train"]


def test_generation_beside_the_trainer_counts_only_where_it_takes_longer(skeleton):
    recipe = loaded("grpo-8gpu-async")
    times = times_of(skeleton, recipe)
    assert times.total == max(times.phases["generate"], sum(times.phases.values()) - times.phases["generate"])
    found = prediction_of(Question(recipe=recipe, skeleton=skeleton, gpu=H100, lengths=None))
    assert "asynchronous" in found.unknown["phase_s/generate"]
    assert "phase_s/generate" not in found.figures


def test_on_gpus_memory_times_and_mfu_are_predicted_by_the_names_of_the_log(skeleton):
    recipe = loaded("grpo-8gpu-colocated")
    found = prediction_of(Question(recipe=recipe, skeleton=skeleton, gpu=H100, lengths=Lengths(prompt=100)))
    assert found.unknown == {}
    assert {*found.figures} == {
        "memory_trainer_peak_bytes",
        *(f"memory_device_bytes/{phase}" for phase in ("training", "refitting", "generating")),
        *(f"phase_s/{phase}" for phase in ("generate", "train", "refit")),
        "tokens_per_s",
        "mfu",
    }
    assert found.device == "8 x NVIDIA H100 80GB HBM3"
    assert (found.stage, found.assumed[0]) == ("grpo", "prompts of 100 tokens")
    assert 0 < found.figures["mfu"] < 0.45


def test_a_gpu_that_no_data_sheet_is_known_of_gives_memory_and_says_what_is_unknown(skeleton):
    gpu = named_gpu({"NVIDIA Future"}, 80 * 2**30)
    found = prediction_of(Question(recipe=loaded("grpo-8gpu-colocated"), skeleton=skeleton, gpu=gpu, lengths=None))
    assert "memory_device_bytes/training" in found.figures
    assert "peak of a NVIDIA Future" in found.unknown["phase_s/train"]
    assert "bandwidth of the memory of a NVIDIA Future" in found.unknown["phase_s/generate"]
    assert {"mfu", "tokens_per_s"} <= {*found.unknown}
    assert named_gpu({"NVIDIA H200", "NVIDIA L4"}, 5).device_name == "", "unequal GPUs are none by name"


def test_a_run_on_a_cpu_writes_its_prediction_and_says_what_is_not_predicted(recipe, waiting):
    run_resolved(load_recipe(recipe, schema=Recipe))
    run = RunDirectory(recipe.parent / "run")
    found = json.loads(run.prediction.read_text())
    assert [*found["figures"]] == ["memory_trainer_peak_bytes"], found
    assert found["figures"]["memory_trainer_peak_bytes"] > 16 * 2_000, "weights, gradients and moments at least"
    assert "nobody states the peak of a CPU" in found["unknown"]["phase_s/train"]
    assert (found["stage"], found["device"]) == ("grpo", "the CPU")
    page = run.report.read_text()
    assert "Predicted and measured" in page
    assert "nobody states the bandwidth of the memory of a CPU" in page


def test_a_run_that_is_over_sooner_ends_the_prediction_and_says_so(recipe, predicting):
    run_resolved(load_recipe(recipe, schema=Recipe, overrides=["grpo=null", "sft.max_num_steps=1"]))
    found = json.loads(RunDirectory(recipe.parent / "run").prediction.read_text())
    assert found["unknown"] == {"prediction": "the run ended before it was made"}


def test_a_prediction_that_fails_is_named_and_the_run_goes_on(recipe, waiting, monkeypatch):
    monkeypatch.setattr(prediction, "CHILD", "raise RuntimeError('no such thing')")
    summary = run_resolved(load_recipe(recipe, schema=Recipe))
    assert summary["ended_by"] is None
    found = json.loads(RunDirectory(recipe.parent / "run").prediction.read_text())
    assert found["unknown"] == {"prediction": "it failed with exit code 1: RuntimeError: no such thing"}


def test_a_model_that_another_process_cannot_have_is_named(recipe, waiting, monkeypatch):
    """Classes of a program's own are not there in another process."""

    class Unknown(torch.nn.Module):
        pass

    monkeypatch.setattr("rl_launcher.build.build.without_weights", lambda _: Unknown())
    summary = run_resolved(load_recipe(recipe, schema=Recipe))
    assert summary["ended_by"] is None
    found = json.loads(RunDirectory(recipe.parent / "run").prediction.read_text())
    assert "it failed" in found["unknown"]["prediction"]
    assert "Unknown" in found["unknown"]["prediction"]


def test_lengths_are_those_of_the_rows_that_are_trained_on(recipe):
    from rl_launcher.build.build import build

    parts = build(load_recipe(recipe, schema=Recipe).value, run_dir=recipe.parent / "run")
    try:
        grpo = load_recipe(recipe, schema=Recipe).value
        tokens = [len(prompt.tokens) for prompt in parts.data.prompts]
        assert lengths_of(grpo, parts.data) == Lengths(prompt=sum(tokens) / len(tokens))
        rows = parts.data.demonstrations
        found = lengths_of(dataclasses.replace(grpo, grpo=None), parts.data)
        assert found.prompt + found.response == pytest.approx(sum(len(row.tokens) for row in rows) / len(rows))
        assert found.response == pytest.approx(2), "a digit and the stop token"
    finally:
        parts.close()


KILLED = """
import sys, time
from rl_launcher.run import prediction
from rl_observe import RunDirectory, Secrets
prediction.CHILD = "import time; time.sleep(600)"
background = prediction.BackgroundPrediction(RunDirectory(sys.argv[1]), None, secrets=Secrets())
while background._process is None:
    time.sleep(0.01)
time.sleep(2)  # it has begun
print(background._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it lives until it is done")
def test_a_run_that_is_killed_leaves_no_prediction_behind(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        child = int(driver.stdout.readline())
        assert os.getpriority(os.PRIO_PROCESS, child) == 19
        driver.kill()
    for _ in range(600):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)
