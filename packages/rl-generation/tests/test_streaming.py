"""Streams of the embedded engine: whatever is generated beside them, each gets what it would have got alone."""

import asyncio
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from stepwise import Stepwise, under_way, wait_for_turn

from rl_generation.engine import RequestEngine, StreamingEngine
from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, PromptError
from rl_generation.requests import Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.transformers_engine import TransformersEngine

SAMPLING = Sampling(max_new_tokens=12, n=2, seed=3)
LONG = Sampling(max_new_tokens=60, ignore_eos=True, seed=0)
PATIENCE_S = 60


@pytest.fixture
def served(tiny):
    """An engine that streams, and one of the same weights that nothing else uses."""
    streaming = Stepwise(engine(tiny("llama")))
    yield streaming, engine(tiny("llama"))
    streaming.go_on()
    streaming.close()


def engine(model):
    return TransformersEngine(model, stop_token_ids=[2], pad_token_id=0)


async def collect(streaming, prompt, sampling):
    """The rollouts of one request; each is what its deltas say."""
    tokens, logp, rollouts = {}, {}, {}
    async for delta in streaming.stream(prompt, sampling):
        tokens[delta.sample_index] = tokens.get(delta.sample_index, ()) + delta.tokens
        logp[delta.sample_index] = logp.get(delta.sample_index, ()) + delta.logp
        if delta.rollout is not None:
            rollouts[delta.sample_index] = delta.rollout
    assert {index: rollout.tokens for index, rollout in rollouts.items()} == tokens
    assert {index: rollout.logp for index, rollout in rollouts.items()} == logp
    return [rollouts[index] for index in sorted(rollouts)]


async def in_the_midst(streaming, *tokens):
    """Ask for a long answer after each of these, and hold the engine in the midst of all, until `go_on()`."""
    streaming.hold(after=0)
    requests = [asyncio.create_task(collect(streaming, [1, token], LONG)) for token in tokens]
    await asyncio.sleep(0)  # all of them have arrived
    streaming.hold(after=3)
    while streaming.metrics().generated_tokens < 3 * len(tokens):  # noqa: ASYNC110  (an engine has no event)
        await asyncio.sleep(0.001)
    return requests


async def nothing_is_under_way(streaming):
    while under_way(streaming):  # noqa: ASYNC110  (an engine has no event to wait for)
        await asyncio.sleep(0.001)


def run(what):
    return asyncio.run(asyncio.wait_for(what, PATIENCE_S))


def same(ours, theirs):
    return [(rollout.tokens, rollout.finish_reason) for rollout in ours] == [
        (rollout.tokens, rollout.finish_reason) for rollout in theirs
    ]


def test_it_is_what_the_protocols_ask_for(served):
    _, plain = served
    assert isinstance(plain, RequestEngine)
    assert isinstance(plain, StreamingEngine)


def test_what_is_streamed_together_is_what_is_generated_alone(served):
    streaming, plain = served
    prompts = [[1, token, 4][: 1 + token % 3] for token in range(5, 21)]
    samplings = [Sampling(max_new_tokens=3 + index, n=1 + index % 3, seed=index) for index in range(16)]

    async def together():
        return await asyncio.gather(*(collect(streaming, *pair) for pair in zip(prompts, samplings, strict=True)))

    for prompt, sampling, rollouts in zip(prompts, samplings, run(together()), strict=True):
        assert same(rollouts, plain.generate([prompt], [sampling]))


def test_streams_submitted_requests_and_generate_share_the_engine(served):
    streaming, plain = served

    async def all_three():
        (request,) = await in_the_midst(streaming, 5)
        future = streaming.submit([1, 6], LONG, seed=6)
        generating = asyncio.create_task(asyncio.to_thread(streaming.generate, [[1, 7]], LONG))
        await asyncio.to_thread(wait_for_turn, streaming)
        streaming.go_on()
        return await request, [await asyncio.wrap_future(future)], await generating

    streamed, submitted, generated = run(all_three())
    assert same(streamed, plain.generate([[1, 5]], LONG))
    assert same(submitted, plain.generate([[1, 6]], [LONG.for_request(6)]))
    assert same(generated, plain.generate([[1, 7]], LONG))


@pytest.mark.parametrize(
    ("prompt", "wrong"), [([99], {}), ([1], {"regex": "a"})], ids=["at once", "once its turn has come"]
)
def test_one_refused_request_does_not_touch_the_others(served, monkeypatch, prompt, wrong):
    streaming, plain = served
    monkeypatch.setattr(streaming._engine, "limits", replace(streaming.limits, tokenizer=object()))

    async def both():
        return await asyncio.gather(
            collect(streaming, [1, 5], SAMPLING),
            collect(streaming, prompt, replace(SAMPLING, ignore_eos=True, **wrong)),
            return_exceptions=True,
        )

    good, bad = run(both())
    assert same(good, plain.generate([[1, 5]], SAMPLING))
    assert isinstance(bad, PromptError)


def test_a_slow_consumer_gets_several_tokens_at_once_and_loses_none(served):
    streaming, plain = served

    async def slowly():
        stream = streaming.stream([1, 5], LONG)
        first = await anext(stream)
        while under_way(streaming):  # the engine gets to the end while nobody takes anything
            time.sleep(0.001)  # noqa: ASYNC251
        return [first, *[delta async for delta in stream]]

    deltas = run(slowly())
    assert 2 <= len(deltas) <= 3
    (rollout,) = plain.generate([[1, 5]], [LONG])
    assert sum((delta.tokens for delta in deltas), ()) == rollout.tokens == deltas[-1].rollout.tokens


def test_closing_the_iterator_aborts_the_request(served):
    streaming, _ = served

    async def one_token():
        streaming.hold(after=3)
        stream = streaming.stream([1, 5], LONG)
        await anext(stream)
        await stream.aclose()
        streaming.go_on()
        await nothing_is_under_way(streaming)

    run(one_token())
    metrics = streaming.metrics()
    assert metrics.finished == {"abort": 1}
    assert metrics.generated_tokens < 60


def test_abort_ends_whatever_is_under_way_and_says_so(served):
    streaming, _ = served

    async def abort_in_the_midst():
        requests = await in_the_midst(streaming, 5, 6, 7)
        future = streaming.submit([1, 8], LONG, seed=0)
        aborting = asyncio.create_task(streaming.abort())
        await asyncio.to_thread(wait_for_turn, streaming)
        streaming.go_on()
        return await aborting, [*await asyncio.gather(*requests), [await asyncio.wrap_future(future)]]

    count, answers = run(abort_in_the_midst())
    assert count == 4
    assert {rollout.finish_reason for (rollout,) in answers} == {"abort"}
    assert all(0 < len(rollout.tokens) < 60 for (rollout,) in answers[:3])


def test_weights_may_change_between_two_steps_and_rollouts_say_where(served):
    streaming, _ = served

    def new_weights():
        with streaming.between_steps(), torch.no_grad():
            streaming.model.lm_head.weight.mul_(0.5)
            streaming.commit_version(4)

    async def change_in_the_midst():
        (request,) = await in_the_midst(streaming, 5)
        await asyncio.to_thread(streaming.go_on_after, new_weights)
        return await request

    (rollout,) = run(change_in_the_midst())
    first, second = rollout.versions
    assert (first, second.version, second.end) == (VersionSpan(version=0, start=0, end=second.start), 4, 60)
    assert 0 < second.start < 60
    assert rollout.version == 0


def test_a_pause_freezes_all_and_what_is_asked_for_meanwhile_waits(served):
    streaming, plain = served

    async def pause_in_the_midst():
        (request,) = await in_the_midst(streaming, 5)
        await asyncio.to_thread(streaming.go_on_after, streaming.pause)
        assert streaming.is_paused
        before = streaming.metrics().generated_tokens
        future = streaming.submit([1, 6], LONG, seed=6)
        generating = asyncio.create_task(asyncio.to_thread(streaming.generate, [[1, 7]], LONG))
        await asyncio.wait([request, generating], timeout=0.5)
        assert [each.done() for each in (request, future, generating)] == [False] * 3
        assert streaming.metrics().generated_tokens == before
        streaming.resume()
        return await request, [await asyncio.wrap_future(future)], await generating

    streamed, submitted, generated = run(pause_in_the_midst())
    assert not streaming.is_paused
    assert same(streamed, plain.generate([[1, 5]], LONG))
    assert same(submitted, plain.generate([[1, 6]], [LONG.for_request(6)]))
    assert same(generated, plain.generate([[1, 7]], LONG))
    with pytest.raises(EngineOptionError, match="mode='keep' alone; got mode='abort'"):
        plain.pause(mode="abort")


def test_broken_logits_end_the_streams_that_met_them_and_the_engine_serves_the_next_ones(served):
    """Token 9 has an embedding of NaN: only requests that hold it are lost."""
    streaming, plain = served
    embedding = streaming.model.get_input_embeddings().weight
    kept = embedding[9].detach().clone()
    with torch.no_grad():
        embedding[9] = torch.nan
    sampling = Sampling(max_new_tokens=4, n=2, top_k=1)

    async def broken():
        requests = (collect(streaming, [1, token], sampling) for token in (5, 9, 6))
        return await asyncio.gather(*requests, return_exceptions=True)

    first, lost, second = run(broken())
    assert isinstance(lost, LogpError)
    assert same(first + second, plain.generate([[1, 5], [1, 6]], sampling))
    with torch.no_grad():
        embedding[9] = kept
    assert same(run(collect(streaming, [1, 9], sampling)), plain.generate([[1, 9]], sampling))


def test_a_forward_that_fails_ends_every_stream_and_the_engine_goes_on(served, monkeypatch):
    streaming, plain = served
    forward = streaming.model.forward
    monkeypatch.setattr(streaming.model, "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError("full")))

    async def broken():
        requests = (collect(streaming, [1, token], SAMPLING) for token in (5, 6))
        return await asyncio.gather(*requests, return_exceptions=True)

    assert all(isinstance(error, MemoryError) for error in run(broken()))
    monkeypatch.setattr(streaming.model, "forward", forward)
    assert same(run(collect(streaming, [1, 5], SAMPLING)), plain.generate([[1, 5]], SAMPLING))


def test_several_event_loops_may_stream_at_once(served):
    streaming, plain = served
    answers = {}

    def one(token):
        answers[token] = run(collect(streaming, [1, token], SAMPLING))

    threads = [threading.Thread(target=one, args=(token,)) for token in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(same(answers[token], plain.generate([[1, token]], SAMPLING)) for token in (5, 6, 7))


def test_a_step_that_does_not_end_is_no_health(served):
    streaming, _ = served
    run(streaming.check_health(timeout_s=0.05))

    async def held():
        (request,) = await in_the_midst(streaming, 5)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDeadError, match=r"in one step for more than 0\.05 s"):
            await streaming.check_health(timeout_s=0.05)
        await streaming.check_health()
        streaming.go_on()
        await request

    run(held())
    run(streaming.check_health(timeout_s=0.05))


@pytest.mark.parametrize("paused", [False, True])
def test_closing_ends_open_streams_and_leaves_no_thread(tiny, paused):
    before = set(threading.enumerate())
    streaming = Stepwise(engine(tiny("llama")))

    def close():
        if paused:
            streaming.pause()
        streaming.close()

    async def close_in_the_midst():
        (request,) = await in_the_midst(streaming, 5)
        await asyncio.to_thread(streaming.go_on_after, close)
        with pytest.raises(EngineDeadError, match="closed while this request was under way"):
            await request

    run(close_in_the_midst())
    streaming.close()
    assert set(threading.enumerate()) <= before
    streaming.resume()
    assert len(run(collect(streaming, [1, 5], LONG))) == 1
