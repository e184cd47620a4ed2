"""Real vLLM in processes of its own, over two ranks: it can be killed, is missed at once, and is made anew."""

import os
import signal
import threading
import time
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from watching import left_of, living, shared_memory

from rl_generation.errors import EngineDeadError
from rl_generation.requests import Sampling
from rl_generation.vllm import VllmEngine

GREEDY = Sampling(max_new_tokens=16, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_new_tokens=400, ignore_eos=True)
DEADLINE_S = 60.0  # for a machine that is busy; a second on one that is not
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""vLLM's n-gram proposer must not be loaded here: vLLM could not start in process afterwards."""


@pytest.fixture(scope="module")
def engine(checkpoints):
    options = tiny.options(
        checkpoints("llama"),
        tensor_parallel_size=2,
        speculative_config=SPECULATION,
        worker_extension_cls="weights_worker.WeightsWorker",
    )
    with VllmEngine(options, own_process=True, version=2) as engine:
        yield engine


def check_answers(engine, model):
    """Greedy, with speculation, over two ranks: as a plain forward says."""
    prompts = [[7, 8, 9, 10] * 6, *tiny.prompts(3)]
    for prompt, rollout in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=1e-4)
        assert rollout.version == 2


def test_two_ranks_with_speculation_answer_as_a_plain_forward_does(engine):
    check_answers(engine, tiny.policy("llama", 0))
    engine.check_health()
    assert "in its own process" in engine.explain()
    engine.add_request("a", [7, 8, 9, 10] * 6, GREEDY)
    deltas = []
    while engine.has_unfinished_requests():
        deltas += [delta for _, delta in engine.step()]
    (whole,) = engine.generate([[7, 8, 9, 10] * 6], GREEDY)
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens == deltas[-1].rollout.tokens
    assert engine.metrics().generated_tokens >= 16 * 5


def test_every_worker_runs_what_the_extension_has(engine):
    assert engine.collective_rpc("scale_norm", args=(1.0,), timeout_s=60) == [[0, 1.0], [1, 1.0]]
    engine.commit_version(2)


@pytest.mark.parametrize("which", ["core", "worker"])
def test_a_killed_process_is_missed_within_a_deadline_and_restart_makes_a_new_engine(engine, which):
    processes, files = engine.process_ids, shared_memory(engine.process_ids)
    victim = processes[0] if which == "core" else processes[-1]
    timer = threading.Timer(0.4, os.kill, (victim, signal.SIGKILL))
    began = time.monotonic()
    timer.start()
    with pytest.raises(EngineDeadError, match=r"restart\(\) makes a new engine") as caught:
        engine.generate(tiny.prompts(32) * 8, LONG)
    assert time.monotonic() - began < DEADLINE_S
    assert all(each.finish_reason for each in caught.value.rollouts)
    for ask in (engine.check_health, engine.reset_prefix_cache, lambda: engine.generate([[5]], GREEDY)):
        began = time.monotonic()
        with pytest.raises(EngineDeadError):
            ask()
        assert time.monotonic() - began < DEADLINE_S
    if which == "core":
        engine.restart()
        assert not living(processes)
        assert left_of(files) == set()
        check_answers(engine, tiny.policy("llama", 0))
    else:
        engine.close()
        assert not living(processes)
        assert left_of(files) == set()


def test_a_closed_engine_says_so_and_can_be_closed_again(engine):
    engine.close()
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        engine.explain()
