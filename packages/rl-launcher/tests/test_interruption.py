"""Claims about Ctrl-C and SIGTERM: the state is saved, the message says where, and the run can go on."""

import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rl_backends import DTensorBackend
from rl_launcher.checkpoints import export
from rl_launcher.checkpoints.folders import read_checkpoint
from rl_launcher.checkpoints.progress import data_digest
from rl_launcher.cli import app
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.run.signals import Interruption, keep_signals
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory, read_events


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_an_interrupted_run_saves_its_state_and_can_go_on(recipe, tmp_path, number, newest):
    command = [sys.executable, "-m", "rl_launcher", "run", str(recipe), "grpo.max_num_steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 240
        while not (metrics.exists() and '"grpo"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = " ".join(errors.split())
    assert "interrupted" in said
    assert f"rl-launcher resume {tmp_path}/run" in said
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "version" in line]  # the others are evaluations
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] == steps[-1]["version"]
    assert (tmp_path / "run" / "report.html").is_file()
    assert summary["ended_by"] == "interrupted"
    assert summary["conditions"] == {"interrupted": 1}
    assert read_checkpoint(newest(tmp_path / "run")).version == summary["steps"]


def on_megatron(precision, steps):
    overrides = ["policy.megatron_cfg.enabled=true", f"policy.megatron_cfg.precision={precision}"]
    absent = importlib.util.find_spec("megatron") is None
    marks = [
        pytest.mark.skipif(absent, reason="megatron-core is not installed"),
        # megatron-core 0.16.1, of its own calls
        pytest.mark.filterwarnings("ignore:Warning. tp_group is None, using default tp group:DeprecationWarning"),
    ]
    return pytest.param(overrides, steps, marks=marks)


KL = "grpo.objective.kl.weight=0.1"
SEVERAL = ["grpo.objective.selection.max_generation_batches=2", "grpo.steps_per_generation=4"]
DPO = "dpo={max_num_steps: 6, batch_size: 4, num_prompts: 6, num_generations_per_prompt: 8, optimizer: {lr: 0.001}}"
DISTILL = (
    "distill={max_num_steps: 4, num_prompts: 4, num_generations_per_prompt: 2, k: 4, optimizer: {lr: 0.001}, "
    "teacher: {model_name: FOLDER/model.py:build}}"
)
CASES = {
    "in sft": ([], 3),
    "at the end of sft": ([], 6),
    "in grpo": ([], 8),
    "at the end of grpo": ([], 10),
    "at the end of grpo with a reference": ([KL], 10),
    "in grpo with a reference": ([KL], 8),
    "in grpo alone with a reference": ([KL, "sft=null"], 2),
    "in grpo of several steps a batch and batches a step": (SEVERAL, 7),
    "in sft alone": (["grpo=null"], 4),
    "in dpo": (["grpo=null", DPO, "evaluation.every=1"], 9),
    "in distillation": (["grpo=null", DISTILL], 8),
    "in grpo, on Megatron": on_megatron("float32", 8),
    "in grpo, on Megatron in bfloat16": on_megatron("bfloat16", 8),
}


# The others end a stage, or stop within it, as these do.
QUICK = {
    "in grpo of several steps a batch and batches a step",
    "at the end of grpo with a reference",
    "in distillation",
}
SLOW = {name for name in CASES if name not in QUICK and "Megatron" not in name}


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [pytest.param(*case, marks=pytest.mark.slow) if name in SLOW else case for name, case in CASES.items()],
    ids=CASES,
)
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_run_bit_for_bit(
    recipe, tmp_path, monkeypatch, overrides, steps, curve, stop_after
):
    def load(name):
        asked = [text.replace("FOLDER", str(tmp_path)) for text in overrides]
        return load_recipe(recipe, schema=Recipe, overrides=[*asked, f"run_dir={tmp_path}/{name}", "seed=3"])

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
    assert not (tmp_path / "parts" / "checkpoints").exists()
    assert expected["conditions"] == {}
    assert summary["conditions"] == {"interrupted": 1, "resumed": 1}


def test_a_run_that_asked_for_more_prompts_goes_on_behind_them(recipe, tmp_path, monkeypatch, curve, stop_after):
    rows = [json.dumps({"prompt": f"{number}+0=", "answer": str(number % 10)}) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions):\n"
        "    return [len(set(c)) / 5 if int(p[:-3]) % 3 == 0 else 0.0 for p, c in zip(prompts, completions)]\n"
    )
    overrides = ["sft=null", "grpo.objective.selection.max_generation_batches=4", "grpo.num_prompts=2"]
    whole, parts = ([*overrides, f"run_dir={tmp_path}/{name}"] for name in ("whole", "parts"))
    run(load_recipe(recipe, schema=Recipe, overrides=whole))
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RunStoppedError):
            run(load_recipe(recipe, schema=Recipe, overrides=parts))
    resume(tmp_path / "parts")
    asked = [line["environment/generation_batches"] for line in curve(tmp_path / "whole") if "sampled_tokens" in line]
    assert max(asked[:2]) > 1
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_an_asynchronous_run_goes_on_with_its_buffer_and_says_that_it_is_not_the_same_bits(
    recipe, tmp_path, monkeypatch, curve, newest, stop_after
):
    ahead = "grpo.async_grpo={max_staleness: 3, groups_per_call: 1}"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RunStoppedError):
            run(load_recipe(recipe, schema=Recipe, overrides=["sft=null", ahead]))
    state = json.loads((newest(tmp_path / "run") / "progress.json").read_text())["state"]
    assert state["finished"] == 2 * 4
    assert {group["ticket"] for group in state["groups"]} <= set(range(8, 16))
    summary = resume(tmp_path / "run")
    assert [line["step"] for line in curve(tmp_path / "run")] == [0, 2, 4, 6, 8]
    assert summary["steps"] == 8
    (told,) = [event for event in read_events(RunDirectory.open(tmp_path / "run")) if event["name"] == "resumed"]
    assert "depends on timing (grpo.async_grpo)" in told["message"]


@pytest.mark.slow
def test_a_run_may_be_interrupted_twice(recipe, tmp_path, monkeypatch, newest, stop_after):
    took = []
    whole = run(load_recipe(recipe, schema=Recipe, overrides=[f"run_dir={tmp_path}/whole"]))
    for attempt, steps in ((lambda: run(load_recipe(recipe, schema=Recipe)), 2), (lambda: resume(tmp_path / "run"), 5)):
        with monkeypatch.context() as patch:
            stop_after(patch, steps)
            with pytest.raises(RunStoppedError):
                attempt()
        took.append(json.loads((newest(tmp_path / "run") / "progress.json").read_text())["wall_s"])
    summary = resume(tmp_path / "run")
    assert summary["held_out_sampled_after"] == whole["held_out_sampled_after"]
    assert 0 < took[0] < took[1] < summary["wall_s"]


def test_a_finished_run_has_nothing_to_resume(recipe, tmp_path):
    run(load_recipe(recipe, schema=Recipe))
    with pytest.raises(Refusal, match="nothing to resume: it has finished"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("save_period", [0, 2])
def test_a_run_that_fails_in_the_middle_of_a_batch_goes_on_from_the_last_checkpoint_or_says_that_it_cannot(
    recipe, tmp_path, monkeypatch, save_period
):
    steps = itertools.count(1)

    def fails_at_eight(backend, original=DTensorBackend.optim_step):
        if next(steps) == 8:  # 6 of sft, then the second of the two on the first batch of rollouts
            raise RuntimeError("no")
        return original(backend)

    resolved = load_recipe(recipe, schema=Recipe, overrides=[f"checkpointing.save_period={save_period}"])
    with monkeypatch.context() as patch:
        patch.setattr(DTensorBackend, "optim_step", fails_at_eight)
        with pytest.raises(RunStoppedError) as stopped:
            run(resolved)
    assert stopped.value.exit_code == 1
    half = tmp_path / "run" / "checkpoints" / "in_step_00000007"
    if save_period:
        assert "step_00000006, step 6 of sft" in str(stopped.value)
        assert not half.exists()
        assert resume(tmp_path / "run")["steps"] == 14
    else:
        assert f"rl-launcher export {half} FOLDER" in str(stopped.value)
        with pytest.raises(Refusal, match="nothing to resume: it failed in the middle of a batch"):
            resume(tmp_path / "run")
        assert (export(half, tmp_path / "half") / "model.safetensors").is_file()


@pytest.fixture
def interrupt(recipe, monkeypatch, stop_after):
    def end(*overrides):
        with monkeypatch.context() as patch:
            stop_after(patch, 7)
            with pytest.raises(RunStoppedError):
                run(load_recipe(recipe, schema=Recipe, overrides=overrides))

    return end


def test_a_run_is_not_resumed_on_other_data(recipe, tmp_path, monkeypatch, interrupt):
    interrupt()
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace("5+0", "5+4"))
    with pytest.raises(Refusal, match="the data have changed"):
        resume(tmp_path / "run")
    (tmp_path / "rows.jsonl").write_text(rows)
    assert resume(tmp_path / "run")["steps"] == 14


def test_a_run_is_not_resumed_on_other_answers_to_the_same_prompts(recipe, tmp_path, interrupt):
    interrupt()
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows.replace('"answer": "3"', '"answer": "4"'))
    with pytest.raises(Refusal, match="the data have changed"):
        resume(tmp_path / "run")


ECHO = """
from rl_algorithms.contracts import EnvironmentReturn

class Echo:
    def reset(self, *, seed, row):
        return row["prompt"]

    def step(self, answer):
        return EnvironmentReturn(reward=1.0 * len(set(answer)), terminated=True)

    def close(self):
        pass
"""
CODE = {
    "env.reward": ("reward.py", []),
    "env.rewards.right, env.rewards.also": (
        "reward.py",
        ["env={reward: null, rewards: {right: FOLDER/reward.py:score, also: FOLDER/reward.py:score}}"],
    ),
    "env.environment": ("echo.py", ["env={reward: null, environment: FOLDER/echo.py:Echo}"]),
    "policy.model_name": ("model.py", []),
}


@pytest.fixture
def anew(monkeypatch):
    """As in a process that has imported none of the user's files yet."""

    def forget():
        for name in [name for name in sys.modules if name.startswith("_recipe_file_")]:
            monkeypatch.delitem(sys.modules, name)

    return forget


@pytest.mark.parametrize("keys", CODE)
def test_a_run_that_goes_on_says_which_code_has_changed(recipe, tmp_path, interrupt, anew, keys):
    name, overrides = CODE[keys]
    file = tmp_path / name
    (tmp_path / "echo.py").write_text(ECHO)
    interrupt(*[text.replace("FOLDER", str(tmp_path)) for text in overrides])
    file.write_text(file.read_text() + "\n# mended\n")
    anew()
    assert resume(tmp_path / "run")["steps"] == 14
    (told,) = [event for event in read_events(RunDirectory.open(tmp_path / "run")) if event["name"] == "resumed"]
    assert f"; {file} ({keys}) has changed since" in told["message"]


def test_a_change_of_code_is_told_once(recipe, tmp_path, monkeypatch, interrupt, anew, stop_after):
    interrupt()
    reward = tmp_path / "reward.py"
    for mended in ("", "\n# mended\n"):
        reward.write_text(reward.read_text() + mended)
        anew()
        with monkeypatch.context() as patch:
            stop_after(patch, 1)
            with pytest.raises(RunStoppedError):
                resume(tmp_path / "run")
    anew()
    resume(tmp_path / "run")
    events = read_events(RunDirectory.open(tmp_path / "run"))
    assert ["reward.py" in event["message"] for event in events if event["name"] == "resumed"] == [False, True, False]


def test_a_fingerprint_of_data_is_the_same_in_every_process():
    def row(order, number):
        columns = {name: {"a", "b"} if name == "set" else [object(), {"x": number}] for name in order}
        return types.SimpleNamespace(tokens=[1, 2], row=types.SimpleNamespace(columns=columns))

    def digest(*rows):
        none = {"held_out": [], "demonstrations": [], "held_out_demonstrations": [], "pairs": None, "labelled": None}
        data = types.SimpleNamespace(prompts=list(rows), **none)
        return data_digest(types.SimpleNamespace(data=data, validation={}, reward_pairs=None))

    assert digest(row(["set", "list"], 1)) == digest(row(["list", "set"], 1))
    assert digest(row(["set", "list"], 1)) != digest(row(["set", "list"], 2))


def test_a_run_is_resumed_from_where_it_was_started(recipe, tmp_path, monkeypatch, interrupt):
    interrupt()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="resume it there"):
        resume(tmp_path / "run")


def test_a_damaged_state_is_named(recipe, tmp_path, monkeypatch, newest, interrupt):
    interrupt()
    (newest(tmp_path / "run") / "progress.json").write_text('{"stage": "grpo"')
    with pytest.raises(Refusal, match=r"progress\.json: 16 bytes, and \d+ were written: truncated; restore it"):
        resume(tmp_path / "run")


def test_the_first_signal_waits_and_the_second_does_not(capfd):
    with Interruption() as interruption:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as what is built meanwhile may do
        interruption.wait_for_steps()
        signal.raise_signal(signal.SIGINT)
        assert "ending after this step" in capfd.readouterr().err
        assert interruption.heard
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.at_once
        interruption.hold()
        signal.raise_signal(signal.SIGINT)  # nothing gets in between while something is written


def test_a_signal_that_comes_directly_and_from_the_parent_counts_once(monkeypatch):
    monkeypatch.setattr(Interruption, "passed_on", signal.SIGUSR2)
    with Interruption() as interruption:
        interruption.wait_for_steps()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)  # the same, sent to all processes of a job
        assert interruption.heard
        assert not interruption.at_once
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR2)  # another, that the parent alone got
        assert interruption.at_once


def test_a_signal_ends_a_run_that_is_being_built_although_a_cluster_has_taken_the_signals():
    def building():
        with keep_signals():
            signal.signal(signal.SIGTERM, lambda *_: None)
        signal.raise_signal(signal.SIGTERM)

    with Interruption(), pytest.raises(KeyboardInterrupt):
        building()


LATE_DRIVER = """
import os, sys, time
from types import SimpleNamespace
from rl_launcher.run import driver_process
driver_process.START_GRACE_S = -1.0
parent = driver_process._Parent(SimpleNamespace(run_dir=sys.argv[1]), resuming=False)
if parent.fork():
    os._exit(130)
time.sleep(0.5)  # it has ended by then
parent._signals = 1
print(parent.wait(), parent.next_restart(), parent.code)
"""


def test_a_driver_that_ends_when_its_time_to_end_is_over_has_ended(tmp_path):
    command = [sys.executable, "-c", LATE_DRIVER, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "None None 130\n"), done.stderr
    assert "interrupted before training began; nothing was written" in done.stderr


def test_before_a_run_trains_what_a_signal_has_broken_is_the_signal_and_later_it_is_not():
    def importing():
        """Fails in its own way, as an import that a signal has interrupted does when it is tried again."""
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    with pytest.raises(KeyboardInterrupt), Interruption():
        importing()
    trained = Interruption()
    trained.wait_for_steps()
    trained.wait_no_more()
    with pytest.raises(AttributeError), trained:
        importing()
    with pytest.raises(AttributeError), Interruption():
        raise AttributeError("of no signal")


def test_before_a_run_trains_a_signal_ends_it_at_once_and_leaves_nothing(recipe, tmp_path, monkeypatch):
    def signalled(_recipe, **_named):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sys.modules["rl_launcher.run.run"], "build", signalled)
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 130
    assert "interrupted before training began; nothing was written" in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_saved_are_not_claimed_to_be(recipe, tmp_path, monkeypatch):
    def full(*_arguments, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DTensorBackend, "save_pretrained", full)
    monkeypatch.setattr(DTensorBackend, "save_checkpoint", full)
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "are free in" in said
    assert "The weights could NOT be saved: [Errno 28] No space left on device" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended_by"] == "disk_full"
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert not (tmp_path / "run" / "model").exists()


def test_a_report_that_cannot_be_written_takes_nothing_from_a_finished_run(recipe, tmp_path, monkeypatch):
    def full(_directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["rl_launcher.run.run"], "write_report", full)
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 0, result.output
    assert "not written: [Errno 28] No space left on device" in " ".join(result.stderr.split())
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
