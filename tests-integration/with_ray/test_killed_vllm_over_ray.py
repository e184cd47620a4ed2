"""vLLM's engine, or all of a run, is killed by SIGKILL: what it leaves is found, and removed by what starts next."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None or find_spec("vllm") is None:
    pytest.skip("Ray or vLLM is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import os
import shutil
import signal
import tempfile
from pathlib import Path

from launched_run import LaunchedRun, command_line, gone, json_lines

from rl_generation.vllm.processes import mapped_shared_memory
from rl_launcher.checks.doctor_findings import left_behind

PATIENCE_S = 200
NAMES = ("psm_", "sem.mp-", "vllm_dist_")
# Two ranks of an engine: they talk through shared memory, and are processes of their own.
ENGINE = [
    "policy.generation.backend=vllm",
    "policy.generation.vllm_cfg.tensor_parallel_size=2",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
    "cluster.gpus_per_node=3",
]
LONG = ["sft.max_num_steps=2", "evaluation.max_prompts=4", "grpo.max_num_steps=100000", "grpo.num_prompts=4"]


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files of the runs, whose path is short, since sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="rl-test-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(name, *overrides):
        arguments = ["run", "quickstart-ray", f"run_dir={tmp_path / name}", *LONG, *overrides]
        started.append(LaunchedRun(*arguments, run_dir=tmp_path / name, cwd=tmp_path))
        return started[-1]

    yield start
    for launched in started:
        launched.close()


def shared_memory_of(run):
    """The files in shared memory that processes of a run have mapped, and that Python or vLLM has named."""
    mapped = mapped_shared_memory(*run.all_pids())
    there = {entry.inode(): Path(entry.path) for entry in os.scandir("/dev/shm") if entry.name.startswith(NAMES)}
    return {file for number, file in there.items() if number in mapped}


def left(folder, files):
    """What is still there."""
    temporary = [path for name in ("rl-vllm-*", "vllm_dist_*") for path in folder.glob(name)]
    return sorted(map(str, [*temporary, *(file for file in files if file.exists())]))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while its engine starts", "while it trains"])
def test_of_a_run_that_was_killed_the_next_one_removes_everything(launch, temporary, moment):
    run = launch("killed", *ENGINE)
    if moment == "while it trains":
        run.wait_for_step(1)
        files = shared_memory_of(run)
        assert files, "ranks of vLLM talk through shared memory"
    else:
        run.wait_until(lambda: [*temporary.glob("rl-vllm-*")], what="an engine's folder")
        files = set()
    for process_id in {*run.pids("driver").values(), *run.pids("engine").values(), run.process.pid}:
        os.kill(process_id, signal.SIGKILL)
    assert [command_line(pid) for pid in gone(run.all_pids(), within_s=120)] == []
    if moment == "while it trains":  # what keeps watch over an engine was there, and has seen to it
        assert left(temporary, files) == []
    found = left_behind(PATIENCE_S).figures
    assert {str(path) for path in temporary.glob("rl-vllm-*")} <= {*found["folders"]}, found
    after = launch("after")
    after.wait_until(lambda: not left(temporary, files), what="the removal")
    after.terminate()
    assert after.end() in {130, -signal.SIGTERM}, after.output  # the latter before the command has begun


@pytest.mark.slow
def test_of_an_engine_that_was_killed_the_one_in_its_place_removes_everything(launch, temporary):
    run = launch("engine", *ENGINE)
    run.wait_for_step(1)
    files, folders = shared_memory_of(run), [*temporary.glob("rl-vllm-*")]
    assert files
    assert len(folders) == 1
    run.kill("engine")
    run.wait_until(
        lambda: "engine_restarted" in {row["name"] for row in json_lines(run.run_dir / "events.jsonl")},
        what="a new engine",
    )
    assert left(temporary, files) == [str(path) for path in temporary.glob("rl-vllm-*") if path not in folders]
    new = shared_memory_of(run)
    run.terminate()
    assert run.end() == 130, run.output
    assert left(temporary, files | new) == []
