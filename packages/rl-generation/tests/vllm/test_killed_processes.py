"""Processes of a real engine with two workers are killed: who waits is told, and what comes after works.

The engine speculates, too, where vLLM can on a CPU: greedy answers are those of a plain forward all the same.
"""

import asyncio
import os
import signal
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from watching import Call, folder, left_of, living, shared_memory, taken, until

from rl_generation.errors import EngineDeadError
from rl_generation.requests import Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.vllm import VllmEngine

DEADLINE_S = 60.0  # for a machine that is busy; a second on one that is not
SHORT = Sampling(max_new_tokens=3, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_new_tokens=480, temperature=0.0, ignore_eos=True)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def engine(checkpoints):
    before = taken()
    options = tiny.options(
        checkpoints("qwen3"),
        tensor_parallel_size=2,
        vllm_kwargs={} if version("vllm").startswith("0.30.") else {"speculative_config": SPECULATION},
        worker_extension_cls="weights_worker.WeightsWorker",
    )
    engine = VllmEngine(options, version=3)
    engine.all_processes, engine.all_folders, engine.all_files = set(), set(), set()
    remember(engine)
    yield engine
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < DEADLINE_S
    assert living(engine.all_processes) == []
    assert not any(each.exists() for each in engine.all_folders)
    assert left_of(engine.all_files) == set()
    assert taken() <= before


def remember(engine):
    """What must be gone after it."""
    engine.all_processes |= set(engine.process_ids)
    engine.all_folders.add(folder(engine))
    engine.all_files |= shared_memory(engine.process_ids)


def title(process_id):
    return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8").partition("\0")[0]


def victim(engine, name):
    """The first living process of the engine that is called so."""
    return next(each for each in living(engine.process_ids) if name in title(each))


def follow(engine, prompt):
    async def to_the_end():
        return [delta async for delta in engine.stream(prompt, LONG)]

    return asyncio.run(to_the_end())


def kill_while_all_wait(engine, name):
    """Kill a process with a generation, a stream, a pause and a call to the workers under way; their errors."""
    start = engine.metrics().generated_tokens
    calls = {
        "generate": Call(engine.generate, [[5, i] for i in range(6)], [SHORT, *[LONG] * 5]),
        "stream": Call(follow, engine, [5, 6]),
    }
    until(lambda: engine.metrics().generated_tokens > start + 24)
    calls["pause"] = Call(engine.pause, mode="wait")
    process_id = victim(engine, name)
    os.kill(process_id, signal.SIGKILL)
    calls["collective_rpc"] = Call(engine.collective_rpc, "get_norm")
    began = time.monotonic()
    errors = {each: call.join() for each, call in calls.items()}
    assert time.monotonic() - began < DEADLINE_S
    for error in errors.values():
        assert isinstance(error, EngineDeadError)
        assert f"(process {process_id}) of the engine is dead" in str(error)
        assert "restart() makes a new engine" in str(error)
    return errors


def check_that_it_stays_dead(engine):
    for ask in (
        lambda: engine.generate([[5]], SHORT),
        engine.resume,
        engine.reset_prefix_cache,
        lambda: asyncio.run(engine.check_health()),
    ):
        call = Call(ask)
        assert isinstance(call.join(), EngineDeadError)


def test_two_workers_with_speculation_answer_as_a_plain_forward_whole_and_in_pieces(engine):
    model, prompts = tiny.policy("qwen3", 0), [[7, 8, 9, 10] * 6, *tiny.prompts(3)]
    asyncio.run(engine.check_health())
    for prompt, rollout in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=1e-4)
    (whole,) = engine.generate(prompts[:1], LONG)
    pieces = follow(engine, prompts[0])
    assert tuple(token for delta in pieces for token in delta.tokens) == whole.tokens == pieces[-1].rollout.tokens
    assert [rank for rank, _ in engine.collective_rpc("scale_norm", args=[1.0])] == [0, 1]


def test_the_death_of_the_engine_core_is_named_and_restart_works(engine):
    (greedy,) = engine.generate([[5, 6]], GREEDY)
    engine.collective_rpc("scale_norm", args=[0.25])
    engine.commit_version(9)
    errors = kill_while_all_wait(engine, "EngineCore")
    assert "EngineCore (process" in str(errors["generate"])
    assert "killed by SIGKILL" in str(errors["generate"])
    assert [(each.prompt_index, len(each.tokens)) for each in errors["generate"].rollouts] == [(0, 3)]
    check_that_it_stays_dead(engine)
    engine.restart()
    assert left_of(engine.all_files) == set()
    remember(engine)
    (again,) = engine.generate([[5, 6]], GREEDY)
    assert again.tokens == greedy.tokens
    assert again.logp == pytest.approx(greedy.logp, abs=1e-5)
    assert again.versions == (VersionSpan(version=3, start=0, end=12),)
    assert engine.version == 3


def test_the_death_of_a_worker_is_named(engine):
    errors = kill_while_all_wait(engine, "Worker_TP1")
    assert "Worker_TP1 (process" in str(errors["generate"])
    assert [each.prompt_index for each in errors["generate"].rollouts] == [0]
    check_that_it_stays_dead(engine)
