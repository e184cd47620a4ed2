"""Faults injected from outside into runs over real Ray: each is named, the run goes on, its curve stays the same."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import itertools
import json
import os
import signal
import time

from launched_run import LaunchedRun, command_line, curve, gone, json_lines
from pausable_reward import REWARD, RunPause

STEPS = 16
RECIPE = """
run_dir: {run_dir}
cpu_threads: 1
cluster: {{runtime: ray, gpus_per_node: 3, max_restarts: 1, env_vars: {{OMP_NUM_THREADS: "1"}}}}
checkpointing: {{save_period: 2}}
policy:
  model_name: rl_launcher.quickstart.tiny_model:build
  generation:
    max_new_tokens: 9
    colocated: {{enabled: false, resources: {{gpus_per_node: 1}}}}
data: {{source: "rl_launcher.quickstart.sort_digits:dataset"}}
env: {{reward: "{reward}"}}
evaluation: {{max_prompts: 20, samples: 2}}
sft:
  max_num_steps: 20
  batch_size: 64
  optimizer: {{lr: 2.0e-3, betas: [0.9, 0.95], warmup_steps: 5}}
grpo:
  max_num_steps: {steps}
  steps_per_generation: 2
  num_prompts: 16
  optimizer: {{lr: 3.0e-4, betas: [0.9, 0.99], warmup_steps: 4}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def launch(folder):
    """Start a run; what is left of it at the end of the test is killed."""
    started = []

    def start(command, *arguments, run_dir):
        started.append(LaunchedRun(command, *arguments, run_dir=folder / run_dir, cwd=folder))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


@pytest.fixture(scope="module")
def run_pause(folder):
    """A run gets no further than the fault that the test is about to inject."""
    with pytest.MonkeyPatch.context() as patched:
        yield RunPause(folder, patched)


def recipe(folder, name):
    path = folder / f"{name}.yaml"
    path.write_text(RECIPE.format(run_dir=folder / name, steps=STEPS, reward=REWARD))
    return path


@pytest.fixture(scope="module")
def uninterrupted(folder, run_pause):
    """The log of a run that nothing happened to."""
    run = LaunchedRun("run", recipe(folder, "whole"), run_dir=folder / "whole", cwd=folder)
    try:
        assert run.end() == 0, run.output
        rows = run.rows()
    finally:
        run.close()
    assert len({row["reward"] for row in rows}) > 1, "the rewards of the task move"
    return rows


def events(run):
    return {event["name"]: event for event in json_lines(run.run_dir / "events.jsonl")}


@pytest.mark.slow
def test_the_death_of_raylet_and_gcs_is_named_and_costs_no_step(launch, run_pause, folder, uninterrupted):
    run_pause.pause(folder / "hurt", step=6)
    run = launch("run", recipe(folder, "hurt"), run_dir="hurt")
    run.wait_for_step(6)
    run.kill("raylet")
    run_pause.pause(folder / "hurt", step=10)
    run.wait_until(lambda: "restarted" in events(run), what="restart")
    told = [event for name, event in events(run).items() if name in {"driver_died", "trainer_died"}]
    assert "Ray's raylet (pid " in told[0]["message"]
    run.wait_for_step(10)
    run.kill("gcs_server")
    run_pause.resume()
    assert run.end() == 1, run.output
    assert "rl-launcher resume" in run.output
    assert "Traceback" not in run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["ended_by"] in {"driver_died", "trainer_died"}
    assert "Ray's GCS (pid " in summary["error"]
    assert (run.run_dir / "report.html").is_file()
    resumed = launch("resume", "hurt", run_dir="hurt")
    assert resumed.end() == 0, resumed.output
    assert curve(resumed.rows()) == curve(uninterrupted)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_the_run_goes_on(launch, run_pause, folder, uninterrupted):
    run_pause.pause(folder / "stopped", step=6)
    run = launch("run", recipe(folder, "stopped"), "cluster.hang_timeout_s=20", run_dir="stopped")
    run.wait_for_step(6)
    stopped = run.pids("trainer")[1]
    run.signal("trainer", 1, signal.SIGSTOP)
    run_pause.resume()
    assert run.end() == 0, run.output
    told = events(run)["trainer_hung"]
    assert told["message"].startswith("trainer rank 1 (")
    assert "cluster.hang_timeout_s=20" in told["message"]
    assert gone([stopped]) == [], "the rank that stood still was ended"
    assert curve(run.rows()) == curve(uninterrupted)


@pytest.mark.slow
def test_a_frozen_engine_is_replaced_as_a_dead_one_is(launch, run_pause, folder, uninterrupted):
    run_pause.pause(folder / "frozen", step=6)
    run = launch("run", recipe(folder, "frozen"), "cluster.hang_timeout_s=20", run_dir="frozen")
    run.wait_for_step(6)
    run.signal("engine", 0, signal.SIGSTOP)
    run_pause.resume()
    assert run.end() == 0, run.output
    assert "frozen" in events(run)["engine_restarted"]["message"]
    assert [(row["step"], row["reward"]) for row in run.rows()] == [
        (row["step"], row["reward"]) for row in uninterrupted
    ]


def signalled_while_it_starts(launch, folder, after_s):
    """Send SIGTERM to the group of a run that began `after_s` seconds ago; None if it trained by then."""
    name = f"group-{after_s}"
    run = launch("run", recipe(folder, name), run_dir=name)
    time.sleep(after_s)
    if (run.run_dir / "metrics.jsonl").exists():
        run.close()
        return None
    began = time.monotonic()
    os.killpg(run.process.pid, signal.SIGTERM)
    code = run.end()
    return {
        "code": code,
        "took_s": time.monotonic() - began,
        "output": run.output,
        "left_over": [command_line(pid) for pid in gone(run.all_pids())],
        "run_dir": run.run_dir.exists(),
    }


def holds(ended):
    """Whether a run that was signalled while it started ended as it should."""
    before_python = ended["code"] == -signal.SIGTERM and not ended["output"]  # before the command has begun
    named = ended["code"] == 130 and "interrupted before training began; nothing was written" in " ".join(
        ended["output"].split()
    )
    clean = "Traceback" not in ended["output"] and not ended["left_over"] and not ended["run_dir"]
    return (before_python or named) and clean and ended["took_s"] < 150


def test_a_signal_to_the_process_group_while_it_starts_ends_it_and_leaves_nothing(launch, folder):
    ended = signalled_while_it_starts(launch, folder, 6)
    if ended is None:
        pytest.skip("it trained already: this machine is faster than the test supposes")
    assert holds(ended), ended


@pytest.mark.slow
def test_a_signal_in_any_second_of_a_start_ends_it_by_name_and_leaves_nothing(launch, folder):
    ended = {}
    for after_s in itertools.count():
        each = signalled_while_it_starts(launch, folder, after_s)
        if each is None:
            break
        ended[after_s] = each
        print(f"second {after_s}: exit code {each['code']} after {each['took_s']:.1f} s, it holds: {holds(each)}")
    assert len(ended) > 3, "a start takes longer"
    assert {after_s: each for after_s, each in ended.items() if not holds(each)} == {}
