"""A recipe over real Ray and real vLLM: two ranks train, an engine generates, and their processes are killed."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None or find_spec("vllm") is None:
    pytest.skip("Ray or vLLM is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import json
import signal

from launched_run import LaunchedRun, curve, gone, json_lines
from pausable_reward import REWARD, RunPause

STEPS = 48
RECIPE = """
run_dir: {run_dir}
cpu_threads: 1
cluster: {{runtime: {runtime}, gpus_per_node: {processes}, env_vars: {{OMP_NUM_THREADS: "1"}}}}
policy:
  model_name: rl_launcher.quickstart.tiny_model:build
  dtensor_cfg: {{tensor_parallel_size: {tensor_parallel_size}}}
  generation:
    max_new_tokens: 9
    colocated: {colocated}
    backend: {backend}
{vllm_cfg}data: {{source: "rl_launcher.quickstart.sort_digits:dataset"}}
env: {{reward: "rl_launcher.quickstart.sort_digits:reward"}}
evaluation: {{max_prompts: 300, samples: 2}}
sft:
  max_num_steps: 60
  batch_size: 128
  optimizer: {{lr: 2.0e-3, betas: [0.9, 0.95], weight_decay: 0.01, warmup_steps: 20}}
grpo:
  max_num_steps: {steps}
  steps_per_generation: 4
  num_prompts: 32
  optimizer: {{lr: 3.0e-4, betas: [0.9, 0.99], warmup_steps: 10}}
"""
VLLM = "{precision: float32, enforce_eager: true, max_model_len: 64, kv_cache_memory_bytes: 33554432}"

SHARE_OF_DIGITS = """
def score(completions, answer):
    return [sum(character.isdigit() for character in completion) / 9 for completion in completions]
"""


@pytest.fixture
def launch(tmp_path):
    """Start a run; what is left of it at the end of the test is killed."""
    started = []

    def start(command, *arguments, run_dir):
        started.append(LaunchedRun(command, *arguments, run_dir=tmp_path / run_dir, cwd=tmp_path))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def recipe(folder, name, *, runtime="ray", tensor_parallel_size=1, backend="vllm"):
    separate = "{enabled: false, resources: {gpus_per_node: 1}}"
    text = RECIPE.format(
        run_dir=folder / name,
        runtime=runtime,
        processes=3 if runtime == "ray" else 1,
        tensor_parallel_size=tensor_parallel_size,
        colocated=separate if runtime == "ray" else "{enabled: true}",
        steps=STEPS,
        backend=backend,
        vllm_cfg=f"    vllm_cfg: {VLLM}\n" if backend == "vllm" else "",
    )
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


@pytest.fixture
def run_pause(tmp_path, monkeypatch):
    """What is done to a run at a step is done before its end, and is not too late because the test was."""
    return RunPause(tmp_path, monkeypatch)


@pytest.mark.slow
def test_it_learns_over_two_ranks_and_goes_on_after_any_end_as_if_there_had_been_none(launch, run_pause, tmp_path):
    whole = launch("run", recipe(tmp_path, "whole"), run_dir="whole")
    assert whole.end() == 0, whole.output
    summary = json.loads(whole.output.splitlines()[-1])
    assert summary["held_out_sampled_after"] > summary["held_out_sampled_before"] + 0.1
    rows = whole.rows()
    assert [row["step"] for row in rows] == [*range(4, STEPS + 1, 4)]
    assert all(row["token_mult_prob_error"] < 1.0001 for row in rows), "the engine holds what the trainer has"

    run_pause.pause(tmp_path / "hurt", step=28)
    asked = ["checkpointing.save_period=8", f"env.reward={REWARD}"]
    hurt = launch("run", recipe(tmp_path, "hurt"), *asked, run_dir="hurt")
    hurt.wait_for_step(20)
    processes = [*hurt.pids("trainer").values(), *hurt.pids("engine").values()]
    hurt.kill_driver()
    assert gone(processes) == [], "a dead driver leaves nobody behind"
    run_pause.pause(tmp_path / "hurt", step=40)
    terminated = launch("resume", "hurt", run_dir="hurt")
    terminated.wait_for_step(36)
    terminated.terminate()
    terminated.wait_until_it_says("ending after this step")
    run_pause.resume()
    assert terminated.end() == 130, terminated.output
    resumed = launch("resume", "hurt", run_dir="hurt")
    assert resumed.end() == 0, resumed.output
    assert curve(resumed.rows()) == curve(rows)


@pytest.mark.slow
def test_an_engine_and_a_rank_that_are_killed_cost_no_step(launch, run_pause, tmp_path):
    path = recipe(tmp_path, "run", tensor_parallel_size=2)
    run_pause.pause(tmp_path / "run", step=36)
    asked = ["checkpointing.save_period=4", "cluster.max_restarts=1", f"env.reward={REWARD}"]
    run = launch("run", path, *asked, run_dir="run")
    run.wait_for_step(8)
    run.kill("engine")
    run.wait_for_step(20)
    run.kill("trainer", 1)
    run_pause.resume()
    assert run.end() == 0, run.output
    rows = run.rows()
    assert [row["step"] for row in rows] == [*range(4, STEPS + 1, 4)], "every step is there, and once"
    assert all(row["token_mult_prob_error"] < 1.0001 for row in rows)
    events = [event["name"] for event in json_lines(run.run_dir / "events.jsonl")]
    assert "engine_restarted" in events
    assert "trainer_died" in events
    summary = json.loads(run.output.splitlines()[-1])
    assert summary["held_out_sampled_after"] > summary["held_out_sampled_before"] + 0.1


def test_the_same_recipe_takes_the_same_first_step_in_process(launch, tmp_path):
    (tmp_path / "share.py").write_text(SHARE_OF_DIGITS)
    first = ["sft=null", "env.reward=share.py:score", "grpo.max_num_steps=11", "grpo.steps_per_generation=1"]
    first += ["evaluation.max_prompts=20"]
    rows = {}
    for runtime in ("ray", "in_process"):
        run = launch("run", recipe(tmp_path, runtime, runtime=runtime, backend="transformers"), *first, run_dir=runtime)
        assert run.end() == 0, run.output
        rows[runtime] = run.rows()[0]
    assert rows["ray"]["reward"] == rows["in_process"]["reward"], "the very same answers"
    assert rows["ray"]["sampled_tokens"] == rows["in_process"]["sampled_tokens"]
    for name in ("loss", "grad_norm", "entropy"):
        assert rows["ray"][name] == pytest.approx(rows["in_process"][name], rel=1e-4, abs=1e-7), name


@pytest.mark.slow
def test_a_second_signal_beside_a_rank_that_stands_still_ends_the_run_at_once(launch, tmp_path):
    share = tmp_path / "share.py"
    share.write_text(SHARE_OF_DIGITS)
    asked = ["sft=null", "env.reward=share.py:score", "grpo.max_num_steps=100000", "checkpointing.save_period=4"]
    run = launch("run", recipe(tmp_path, "run", backend="transformers"), *asked, run_dir="run")
    run.wait_for_step(8)
    processes = [*run.pids("trainer").values(), *run.pids("engine").values()]
    run.signal("trainer", 1, signal.SIGSTOP)
    run.terminate()
    run.wait_until_it_says("ending after this step")
    run.terminate()
    assert run.end() == 130, run.output
    assert gone(processes) == []
    assert "Continue with: rl-launcher resume" in " ".join(run.output.split())
    share.write_text(SHARE_OF_DIGITS + "\n# mended\n")
    resumed = launch("resume", "run", run_dir="run")
    resumed.wait_until(lambda: any(event["name"] == "resumed" for event in json_lines(run.run_dir / "events.jsonl")))
    (told,) = [event for event in json_lines(run.run_dir / "events.jsonl") if event["name"] == "resumed"]
    assert "share.py (env.reward) has changed since" in told["message"]
