"""Claims about Ctrl-C and SIGTERM: the state is saved, the message says where, and the run can go on."""

import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rl_backends import DTensorBackend
from rl_launcher.cli import app
from rl_launcher.errors import LauncherError, RunStoppedError
from rl_launcher.interruption import Interruption
from rl_launcher.recipe import load_recipe
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.running import resume, run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_state_and_can_go_on(recipe, tmp_path, number):
    command = [sys.executable, "-m", "rl_launcher.cli", "run", str(recipe), "grpo.max_num_steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 90
        while not (metrics.exists() and '"grpo"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = " ".join(errors.split())
    assert "interrupted" in said
    assert f"rl-launcher resume {tmp_path}/run" in said
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] == steps[-1]["version"]
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "interrupted" / "model.safetensors").is_file()


def stop_after(monkeypatch, steps):
    """In the place of a signal: end the run at a given number of recorded steps."""
    left, record = itertools.count(steps, -1), Recorder.step

    def step(recorder, *arguments):
        record(recorder, *arguments)
        if next(left) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Recorder, "step", step)


def on_megatron(precision, steps):
    overrides = ["policy.megatron_cfg.enabled=true", f"policy.megatron_cfg.precision={precision}"]
    absent = importlib.util.find_spec("megatron") is None
    marks = [
        pytest.mark.skipif(absent, reason="megatron-core is not installed"),
        # megatron-core 0.16.1, of its own calls
        pytest.mark.filterwarnings("ignore:Warning. tp_group is None, using default tp group:DeprecationWarning"),
    ]
    return pytest.param(overrides, steps, marks=marks)


DPO = "dpo={max_num_steps: 6, batch_size: 4, num_prompts: 6, num_generations_per_prompt: 8, optimizer: {lr: 0.001}}"
CASES = {
    "in sft": ([], 3),
    "at the end of sft": ([], 6),
    "in grpo": ([], 8),
    "at the end of grpo": ([], 10),
    "in sft alone": (["grpo=null"], 4),
    "in dpo": (["grpo=null", DPO, "evaluation.every=1"], 9),
    "in grpo, on Megatron": on_megatron("float32", 8),
    "in grpo, on Megatron in bfloat16": on_megatron("bfloat16", 8),
}


def curve(run_dir):
    timeless = ("time_s", "tokens_per_s", "refit_s")
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if name not in timeless and not name.startswith("phase_s")}
        for line in lines
    ]


@pytest.mark.parametrize(("overrides", "steps"), CASES.values(), ids=CASES)
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    recipe, tmp_path, monkeypatch, overrides, steps
):
    def load(name):
        return load_recipe(recipe, schema=Recipe, overrides=[*overrides, f"run_dir={tmp_path}/{name}", "seed=3"])

    expected = run(load("whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(RunStoppedError, match="rl-launcher resume") as stopped:
            run(load("parts"))
    assert stopped.value.interrupted
    assert sum(line["step"] > 0 for line in curve(tmp_path / "parts")) == steps
    summary = resume(tmp_path / "parts")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    for name in ("steps", "tokens", "held_out_sampled_before", "held_out_sampled_after", "held_out_greedy_after"):
        assert summary[name] == expected[name]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not (tmp_path / "parts" / "interrupted").exists()


def test_a_run_may_be_interrupted_twice(recipe, tmp_path, monkeypatch):
    took = []
    whole = run(load_recipe(recipe, schema=Recipe, overrides=[f"run_dir={tmp_path}/whole"]))
    for attempt, steps in ((lambda: run(load_recipe(recipe, schema=Recipe)), 2), (lambda: resume(tmp_path / "run"), 5)):
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            with pytest.raises(RunStoppedError):
                attempt()
        took.append(json.loads((tmp_path / "run" / "interrupted" / "progress.json").read_text())["wall_s"])
    summary = resume(tmp_path / "run")
    assert summary["held_out_sampled_after"] == whole["held_out_sampled_after"]
    assert 0 < took[0] < took[1] < summary["wall_s"]


def test_a_finished_run_has_nothing_to_resume(recipe, tmp_path):
    run(load_recipe(recipe, schema=Recipe))
    with pytest.raises(LauncherError, match="nothing to resume: it has finished"):
        resume(tmp_path / "run")


def test_a_run_that_stopped_in_the_middle_of_a_batch_says_that_it_cannot_be_resumed(recipe, tmp_path, monkeypatch):
    steps = itertools.count(1)

    def fails_at_eight(backend, original=DTensorBackend.optim_step):
        if next(steps) == 8:  # 6 of sft, then the second of the two on the first batch of rollouts
            raise RuntimeError("no")
        return original(backend)

    monkeypatch.setattr(DTensorBackend, "optim_step", fails_at_eight)
    with pytest.raises(RunStoppedError, match=r"policy\.model_name=.*interrupted sft=null"):
        run(load_recipe(recipe, schema=Recipe))
    with pytest.raises(LauncherError, match=r"holds no progress\.json"):
        resume(tmp_path / "run")


def interrupt(recipe, monkeypatch, *overrides):
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(RunStoppedError):
            run(load_recipe(recipe, schema=Recipe, overrides=overrides))


def test_a_run_is_not_resumed_on_other_data(recipe, tmp_path, monkeypatch):
    interrupt(recipe, monkeypatch)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("5+0", "5+4"))
    with pytest.raises(LauncherError, match="the prompts are no longer those"):
        resume(tmp_path / "run")
    (tmp_path / "rows.jsonl").write_text(rows)
    assert resume(tmp_path / "run")["steps"] == 14


def test_a_run_is_resumed_from_where_it_was_started(recipe, tmp_path, monkeypatch):
    interrupt(recipe, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LauncherError, match="resume it there"):
        resume(tmp_path / "run")


def test_a_damaged_state_is_named(recipe, tmp_path, monkeypatch):
    interrupt(recipe, monkeypatch)
    (tmp_path / "run" / "interrupted" / "progress.json").write_text('{"stage": "grpo"')
    with pytest.raises(LauncherError, match="cannot be resumed from"):
        resume(tmp_path / "run")


def test_the_first_signal_waits_and_the_second_does_not(capfd):
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert "ending after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.in_a_step
        interruption.hold()
        signal.raise_signal(signal.SIGINT)  # nothing gets in between while something is saved


def test_weights_that_cannot_be_saved_are_not_claimed_to_be(recipe, tmp_path, monkeypatch):
    def full(_backend, _folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DTensorBackend, "save_pretrained", full)
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert said.count("No space left on device") == 2
    assert "The weights could NOT be saved" in said
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["tensorboard"]


def test_a_report_that_cannot_be_written_takes_nothing_from_a_finished_run(recipe, tmp_path, monkeypatch):
    def full(_directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_launcher.running.write_report", full)
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 0, result.output
    assert "not written: [Errno 28] No space left on device" in " ".join(result.stderr.split())
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
