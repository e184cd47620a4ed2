"""Real `AsyncLLM`: refits while requests are under way, from a thread beside its event loop."""

import asyncio
import contextlib
import threading
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import psutil
import tiny

from rl_refit.errors import RefitError
from rl_refit.refit import Refit
from rl_refit.vllm import VllmSink

OLD, NEW = 0, 1
PATIENCE_S = tiny.PATIENCE_S


@pytest.fixture(scope="module")
def loop():
    loop = tiny.Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop, checkpoints, served):
    served("qwen3", OLD), served("qwen3", NEW)  # one engine at a time
    options = {"load_format": "dummy", "worker_extension_cls": "faulty_worker.FaultyWorker"}
    with tiny.async_engine(loop, checkpoints("qwen3", OLD), **options) as engine:
        yield engine


def sink_of(engine, **options):
    sink = VllmSink(engine, **options)
    Refit(source(OLD), sink)(version=0)
    return sink


def source(seed):
    return tiny.source(tiny.policy("qwen3", seed))


async def ask(engine, name, prompt=0, begun=None, **others):
    """One request, to its end; `begun` is set when it has a token."""
    from vllm import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=tiny.PROMPTS[prompt])
    async for output in engine.generate(prompt, tiny.sampling(**others), request_id=name):
        last = output
        if begun is not None:
            begun.set()
    return last


def answers(engine, loop, name):
    return [tiny.read(loop.run(ask(engine, f"{name}-{i}", i))) for i in range(len(tiny.PROMPTS))]


def under_way(engine, loop, name, **others):
    """A request that has a token of the old weights."""
    begun = threading.Event()
    long = loop.start(ask(engine, name, begun=begun, **others))
    assert begun.wait(PATIENCE_S)
    return long


@contextlib.contextmanager
def slow_steps(engine, loop):
    """Steps so slow that a request of hundreds of tokens does not end before this test has refitted."""
    loop.run(engine.collective_rpc("dawdle", args=(0.1,)))
    yield
    loop.run(engine.collective_rpc("dawdle", args=(0.0,)))


def test_a_refitted_engine_says_what_one_says_that_loaded_the_checkpoint(engine, loop, served):
    sink = sink_of(engine)
    assert tiny.same(answers(engine, loop, "old"), served("qwen3", OLD))
    Refit(source(NEW), sink)(version=7)
    assert tiny.same(answers(engine, loop, "new"), served("qwen3", NEW))
    assert loop.run(engine.get_weight_version()) == "7"


def test_a_coroutine_refits_through_a_thread_and_is_told_so(engine, loop, served):
    async def refit(how):
        sink = VllmSink(engine)  # the loop is found: this runs in it
        return await how(Refit(source(NEW), sink), version=1)

    async def directly(refit, version):
        return refit(version=version)

    with pytest.raises(RefitError, match=r"from a coroutine, use `await asyncio\.to_thread\(refit, version=…\)`"):
        loop.run(refit(directly))
    report = loop.run(refit(asyncio.to_thread))
    assert report.version == 1
    assert tiny.same(answers(engine, loop, "thread"), served("qwen3", NEW))


def test_requests_that_are_kept_go_on_with_the_new_weights(engine, loop, served):
    sink = sink_of(engine, pause="keep")
    with slow_steps(engine, loop):
        long = under_way(engine, loop, "kept", max_tokens=340)
        Refit(source(NEW), sink)(version=3)
    assert not loop.run(engine.is_paused())
    (answer,) = long.result(PATIENCE_S).outputs
    assert len(answer.token_ids) == 340
    assert answer.finish_reason == "length"
    if hasattr(answer, "weight_versions"):  # vLLM says it since 0.32
        assert [span.version for span in answer.weight_versions] == ["0", "3"]
    assert tiny.same(answers(engine, loop, "after-keep"), served("qwen3", NEW))


def test_requests_that_are_waited_for_have_the_weights_that_they_began_with(engine, loop, served):
    sink = sink_of(engine)
    long = under_way(engine, loop, "waited-for", max_tokens=200)
    Refit(source(NEW), sink)(version=3)
    (answer,) = long.result(PATIENCE_S).outputs
    if hasattr(answer, "weight_versions"):
        assert [span.version for span in answer.weight_versions] == ["0"]
    assert len(answer.token_ids) == 200
    assert tiny.same(answers(engine, loop, "after-wait"), served("qwen3", NEW))


def test_requests_that_are_aborted_say_so(engine, loop, served):
    sink = sink_of(engine, pause="abort")
    with slow_steps(engine, loop):
        long = under_way(engine, loop, "aborted", max_tokens=340)
        Refit(source(NEW), sink)(version=3)
    assert long.result(PATIENCE_S).outputs[0].finish_reason == "abort"
    assert tiny.same(answers(engine, loop, "after-abort"), served("qwen3", NEW))


def test_thirty_refits_leave_no_memory_and_no_file_behind_in_any_process(engine, loop):
    sink = sink_of(engine)
    refits = [Refit(source(seed), sink) for seed in (OLD, NEW)]
    workers = psutil.Process().children(recursive=True)

    def state():
        mapped = [tiny.shared_files(process.pid) for process in workers]
        return [process.memory_info().rss for process in workers], (mapped, [each.num_fds() for each in workers])

    for version in range(1, 11):
        refits[version % 2](version=version)
    memory, files = state()
    for version in range(11, 41):
        refits[version % 2](version=version)
    later, still = state()
    assert still == files
    assert max(b - a for a, b in zip(memory, later, strict=True)) < 4 << 20


def test_pauses_that_an_engine_does_not_know_are_refused(engine):
    with pytest.raises(ValueError, match="pause is 'wait', 'keep' or 'abort'; got 'refuse'"):
        VllmSink(engine, pause="refuse")
