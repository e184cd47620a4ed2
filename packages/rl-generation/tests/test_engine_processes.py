"""Processes that die, what they leave behind, and how long a sample may take; real processes, no vLLM."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_generation.errors import EngineDeadError, EngineOptionError, TimedOutSample
from rl_generation.requests import Limits
from rl_generation.rollout import Rollout, VersionSpan
from rl_generation.vllm.processes import EngineProcesses, process_stat
from rl_generation.vllm.running import Health
from rl_generation.vllm.samples import Sample, sample_timeout_s, timeout_error

PATIENCE_S = 60
PROGRAMS = Path(__file__).parent / "programs"
LIMITS = Limits(vocab_size=10, max_length=100, max_length_name="max_model_len")
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def process(monkeypatch):
    """An engine of one process, and the files that it holds."""
    monkeypatch.syspath_prepend(PROGRAMS)  # which the process inherits
    import holding

    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=holding.hold, args=(theirs,), name="EngineCore")
    processes = EngineProcesses([])
    process.start()
    try:
        assert ours.poll(PATIENCE_S)
        memory, lock = ours.recv()
        process.files = [Path("/dev/shm", memory.lstrip("/")), Path("/dev/shm", f"sem.{lock.lstrip('/')}")]
        processes = EngineProcesses([process])
        yield process
    finally:
        process.kill()
        process.join(PATIENCE_S)
        processes.remove_leftovers()


def test_what_a_killed_process_leaves_in_shared_memory_is_removed(process, capfd):
    foreign = SharedMemory(create=True, size=4096)
    try:
        assert all(file.exists() for file in process.files)
        processes = EngineProcesses([process])
        process.kill()
        process.join(PATIENCE_S)
        assert all(file.exists() for file in process.files)
        processes.remove_leftovers()
        processes.remove_leftovers()
        assert not any(file.exists() for file in process.files)
        assert Path("/dev/shm", foreign.name).exists()
    finally:
        foreign.close()
        foreign.unlink()
    assert capfd.readouterr().err == ""


OWNER = """
import multiprocessing, os, sys
from rl_generation.vllm.processes import ChildProcess, EngineFolder
import holding

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    engine = context.Process(target=holding.hold, args=(theirs,))
    engine.start()
    memory, _ = ours.recv()
    folder = EngineFolder()
    folder.watch({engine.pid: ChildProcess.of(engine.pid)})
    print(engine.pid, folder.path, memory.lstrip("/"), flush=True)
    sys.stdin.read()
"""


def test_the_engine_of_a_program_that_is_killed_ends_with_it_and_leaves_nothing(tmp_path):
    (tmp_path / "owner.py").write_text(OWNER)
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, str(tmp_path / "owner.py")]
    with subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONPATH": path}) as owner:
        engine, folder, memory = owner.stdout.readline().split()
        assert Path("/dev/shm", memory).exists()
        owner.kill()
        deadline = time.monotonic() + PATIENCE_S
        while Path(folder).exists() or Path("/dev/shm", memory).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stat = process_stat(int(engine))
        assert stat is None


def test_the_end_of_processes_waits_for_workers_that_had_to_be_killed():
    # A worker under the engine's process, with memory that takes a while to give back, which nothing but SIGKILL ends.
    worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); b = bytearray(600 << 20); "
    worker += "print(flush=True); time.sleep(600)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    root = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert root.stdout.readline()
        handle = SimpleNamespace(pid=root.pid, join=root.wait)
        processes = EngineProcesses([handle])
        assert len(processes.started) == 2
        processes.end(timeout_s=0.1)
        assert [each for each in processes.started if process_stat(each) is not None] == []
    finally:
        root.kill()
        root.wait()
        root.stdout.close()


def test_whoever_waits_for_a_dead_process_is_told_which_one_and_how(process):
    async def wait():
        health = Health(SimpleNamespace(errored=False), EngineProcesses([process]))
        calls = [asyncio.create_task(health.run(asyncio.Event().wait())) for _ in range(3)]
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S), health

    errors, health = asyncio.run(wait())
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert f"EngineCore (process {process.pid}) of the engine is dead: killed by SIGKILL" in str(error)
    assert health.death is not None


def test_what_the_living_answer_is_handed_on(process):
    async def answer(value):
        if value < 0:
            raise ValueError(value)
        return value

    async def ask():
        health = Health(SimpleNamespace(errored=False), EngineProcesses([process]))
        return await asyncio.gather(*(health.run(answer(each)) for each in (4, -1)), return_exceptions=True)

    good, bad = asyncio.run(ask())
    assert good == 4
    assert isinstance(bad, ValueError)


def test_an_engine_that_failed_without_dying_is_dead_all_the_same(process, monkeypatch):
    monkeypatch.setattr("rl_generation.vllm.running.PATIENCE_S", 0.1)

    async def fail():
        raise OSError("sockets")

    async def ask():
        health = Health(SimpleNamespace(errored=True, engine_core=None), EngineProcesses([process]))
        await health.run(fail())

    with pytest.raises(EngineDeadError, match="vLLM's engine failed, and its log says why"):
        asyncio.run(ask())


def test_a_script_that_would_start_engines_within_engines_is_told():
    script = PROGRAMS / "unguarded.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=True)
    assert (
        'refused: the processes of an engine import the script that makes it: make it under `if __name__ == "__main'
        in run.stderr
    )
    assert "exit code of the process that imported this script: 1" in run.stdout


@pytest.mark.parametrize("value", ["0", "-5", "inf", "nan", "ten", ""])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, value):
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", value)
    with pytest.raises(EngineOptionError, match=f"NRL_VLLM_ASYNC_TIMEOUT_SECONDS must be .*; got '{value}'"):
        sample_timeout_s()


def test_the_limit_of_a_sample_may_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", raising=False)
    assert sample_timeout_s() is None
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", "12.5")
    assert sample_timeout_s() == 12.5


def test_a_timeout_says_what_was_reached_what_is_kept_and_what_to_do():
    spans = (VersionSpan(version=0, start=0, end=1),)
    kept = Rollout(
        tokens=(5,), logp=(-1.0,), logp_of="sampled", finish_reason="length", stop_reason=None, versions=spans
    )
    late = Sample(prompt=(1,), params=None, prompt_index=4, index=1, timeout_s=600.0, tokens=[7] * 81)
    error = timeout_error([late], [kept])
    lost = TimedOutSample(prompt_index=4, sample_index=1, tokens=(7,) * 81)
    assert (error.timed_out, error.rollouts) == ((lost,), (kept,))
    assert str(error).startswith(
        "sample 1 of prompt 4 was aborted after 600 seconds, having reached 81 tokens; the 1 that finished is in this"
    )
    assert str(error).endswith("or double it, NRL_VLLM_ASYNC_TIMEOUT_SECONDS=1200")
    assert "and so did 2 others; the 0 that finished are" in str(timeout_error([late] * 3, []))
