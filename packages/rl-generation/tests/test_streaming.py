import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from stepwise import Stepwise

from rl_generation.engine import Engine, SteppingEngine, StreamingEngine
from rl_generation.errors import EngineDeadError, LogpError, PromptError
from rl_generation.requests import Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.streaming import Streamer
from rl_generation.transformers_engine import TransformersEngine

SAMPLING = Sampling(max_new_tokens=12, n=2, seed=3)
LONG = Sampling(max_new_tokens=60, ignore_eos=True, seed=0)
PATIENCE_S = 60


@pytest.fixture
def served(tiny):
    """A streamer, and an engine of the same weights that nothing else uses."""
    streamer = Streamer(Stepwise(engine(tiny("llama"))))
    yield streamer, engine(tiny("llama"))
    streamer.engine.go_on()
    streamer.close()


def engine(model):
    return TransformersEngine(model, stop_token_ids=[2], pad_token_id=0)


async def collect(streamer, prompt, sampling):
    """The rollouts of one request; each is what its deltas say."""
    tokens, logp, rollouts = {}, {}, {}
    async for delta in streamer.stream(prompt, sampling):
        tokens[delta.sample_index] = tokens.get(delta.sample_index, ()) + delta.tokens
        logp[delta.sample_index] = logp.get(delta.sample_index, ()) + delta.logp
        if delta.rollout is not None:
            rollouts[delta.sample_index] = delta.rollout
    assert {index: rollout.tokens for index, rollout in rollouts.items()} == tokens
    assert {index: rollout.logp for index, rollout in rollouts.items()} == logp
    return [rollouts[index] for index in sorted(rollouts)]


async def under_way(streamer, *tokens):
    """Ask for a long answer after each of these, and hold the engine in the midst of all, until `engine.go_on()`."""
    streamer.engine.hold(after=0)
    requests = [asyncio.create_task(collect(streamer, [1, token], LONG)) for token in tokens]
    await asyncio.sleep(0)  # all of them are in the worker's queue
    streamer.engine.hold(after=3)
    while streamer.engine.metrics().generated_tokens < 3:  # noqa: ASYNC110  (an engine has no event to wait for)
        await asyncio.sleep(0.001)
    return requests


def run(what):
    return asyncio.run(asyncio.wait_for(what, PATIENCE_S))


def same(ours, theirs):
    return [(rollout.tokens, rollout.finish_reason) for rollout in ours] == [
        (rollout.tokens, rollout.finish_reason) for rollout in theirs
    ]


def test_both_are_what_the_protocols_ask_for(served):
    streamer, plain = served
    assert isinstance(streamer, StreamingEngine)
    assert isinstance(plain, Engine)
    assert isinstance(plain, SteppingEngine)


def test_what_is_streamed_together_is_what_is_generated_alone(served):
    streamer, plain = served
    prompts = [[1, token, 4][: 1 + token % 3] for token in range(5, 21)]
    samplings = [Sampling(max_new_tokens=3 + index, n=1 + index % 3, seed=index) for index in range(16)]

    async def together():
        return await asyncio.gather(*(collect(streamer, *pair) for pair in zip(prompts, samplings, strict=True)))

    for prompt, sampling, rollouts in zip(prompts, samplings, run(together()), strict=True):
        assert same(rollouts, plain.generate([prompt], [sampling]))


def test_one_refused_request_does_not_touch_the_others(served):
    streamer, plain = served

    async def both():
        return await asyncio.gather(
            collect(streamer, [1, 5], SAMPLING), collect(streamer, [99], SAMPLING), return_exceptions=True
        )

    good, bad = run(both())
    assert same(good, plain.generate([[1, 5]], SAMPLING))
    assert isinstance(bad, PromptError)


def test_a_slow_consumer_gets_several_tokens_at_once_and_loses_none(served):
    streamer, plain = served

    async def slowly():
        stream = streamer.stream([1, 5], LONG)
        first = await anext(stream)
        # The engine gets to the end while nobody takes anything.
        while await asyncio.wrap_future(streamer.between_steps(streamer.engine.has_unfinished_requests)):
            pass
        return [first, *[delta async for delta in stream]]

    deltas = run(slowly())
    assert 2 <= len(deltas) <= 3
    (rollout,) = plain.generate([[1, 5]], [LONG])
    assert sum((delta.tokens for delta in deltas), ()) == rollout.tokens == deltas[-1].rollout.tokens


def test_closing_the_iterator_aborts_the_request(served):
    streamer, _ = served

    async def one_token():
        streamer.engine.hold(after=3)
        stream = streamer.stream([1, 5], LONG)
        await anext(stream)
        await stream.aclose()
        streamer.engine.go_on()
        # Behind the abort in the worker's queue.
        return await asyncio.wrap_future(streamer.between_steps(lambda: streamer.engine.metrics().running))

    run(one_token())
    metrics = streamer.between_steps(streamer.engine.step).result(PATIENCE_S), streamer.engine.metrics()
    assert metrics[1].running == 0
    assert metrics[1].generated_tokens < 60


def test_abort_ends_every_stream_and_says_so(served):
    streamer, _ = served

    async def abort_after_the_first_tokens():
        requests = await under_way(streamer, 5, 6, 7)
        aborting = asyncio.create_task(streamer.abort())
        await asyncio.sleep(0)  # it is in the worker's queue, behind the step that is held
        streamer.engine.go_on()
        return await aborting, await asyncio.gather(*requests)

    count, answers = run(abort_after_the_first_tokens())
    assert count == 3
    for (rollout,) in answers:
        assert rollout.finish_reason == "abort"
        assert 0 < len(rollout.tokens) < 60


def test_weights_may_change_between_two_steps_and_rollouts_say_where(served):
    streamer, _ = served

    def new_weights():
        with torch.no_grad():
            streamer.engine.model.lm_head.weight.mul_(0.5)
        streamer.engine.commit_version(4)

    async def change_under_way():
        (request,) = await under_way(streamer, 5)
        changed = streamer.between_steps(new_weights)
        streamer.engine.go_on()
        await asyncio.wrap_future(changed)
        return await request

    (rollout,) = run(change_under_way())
    first, second = rollout.versions
    assert (first, second.version, second.end) == (VersionSpan(version=0, start=0, end=second.start), 4, 60)
    assert 0 < second.start < 60
    assert rollout.version == 0


def test_broken_logits_end_every_stream_and_the_engine_serves_the_next_ones(served):
    streamer, plain = served
    head = streamer.engine.model.lm_head.weight
    kept = head.detach().clone()

    def fill(values):
        with torch.no_grad():
            head.copy_(values)

    streamer.between_steps(lambda: fill(torch.full_like(kept, torch.nan))).result(PATIENCE_S)

    async def broken():
        return await asyncio.gather(
            *(collect(streamer, [1, token], SAMPLING) for token in (5, 6)), return_exceptions=True
        )

    assert all(isinstance(error, LogpError) for error in run(broken()))
    streamer.between_steps(lambda: fill(kept)).result(PATIENCE_S)
    assert same(run(collect(streamer, [1, 5], SAMPLING)), plain.generate([[1, 5]], SAMPLING))


def test_several_event_loops_may_stream_at_once(served):
    streamer, plain = served
    answers = {}

    def one(token):
        answers[token] = run(collect(streamer, [1, token], SAMPLING))

    threads = [threading.Thread(target=one, args=(token,)) for token in (5, 6, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(same(answers[token], plain.generate([[1, token]], SAMPLING)) for token in (5, 6, 7))


def test_health_is_an_answer_within_its_deadline(served):
    streamer, plain = served
    run(streamer.check_health())
    impatient = Streamer(plain, health_timeout_s=0.05)
    held = threading.Event()
    impatient.between_steps(lambda: held.wait(PATIENCE_S))
    with pytest.raises(EngineDeadError, match=r"in one step for 0\.05 s"):
        run(impatient.check_health())
    held.set()
    impatient.close()


class Failing:
    """An engine of which every step fails, though not for ever."""

    def __init__(self, error, then):
        self.error, self.then, self.steps, self.unfinished = error, then, 0, False

    def add_request(self, *request):
        self.unfinished = True
        if self.steps:
            self.then.add_request(*request)

    def step(self):
        self.steps += 1
        if self.steps > 1:
            return self.then.step()
        raise self.error

    def abort_request(self, request_id):
        self.unfinished = False
        self.then.abort_request(request_id)

    def has_unfinished_requests(self):
        return self.then.has_unfinished_requests() if self.steps > 1 else self.unfinished


def test_what_does_not_step_is_refused_when_the_streamer_is_made():
    with pytest.raises(TypeError, match=r"object has no add_request, step, .*: a Streamer needs an engine that steps"):
        Streamer(object())


@pytest.mark.parametrize("error", [EngineDeadError("killed"), RuntimeError("broken")], ids=["dead", "broken"])
def test_an_engine_that_fails_is_not_stepped_until_somebody_asks_again(served, error):
    _, plain = served
    failing = Failing(error, plain)
    streamer = Streamer(failing)
    with pytest.raises(type(error), match=str(error)):
        run(collect(streamer, [1, 5], SAMPLING))
    for _ in range(20):
        streamer.between_steps(lambda: None).result(PATIENCE_S)
    assert failing.steps == 1
    if isinstance(error, EngineDeadError):
        with pytest.raises(EngineDeadError, match="killed"):
            run(streamer.check_health())
    assert len(run(collect(streamer, [1, 5], SAMPLING))) == 2
    run(streamer.check_health())
    streamer.close()


def test_closing_ends_open_streams_and_leaves_no_thread(tiny):
    before = set(threading.enumerate())
    streamer = Streamer(Stepwise(engine(tiny("llama"))))

    async def close_under_way():
        (request,) = await under_way(streamer, 5)
        closing = asyncio.create_task(asyncio.to_thread(streamer.close))
        while not streamer._closed:  # noqa: ASYNC110  (it has no event to wait for)
            await asyncio.sleep(0.001)
        streamer.engine.go_on()
        await closing
        return await request

    (rollout,) = run(close_under_way())
    assert rollout.finish_reason == "abort"
    streamer.close()
    with pytest.raises(EngineDeadError, match="closed"):
        run(collect(streamer, [1, 5], LONG))
    assert set(threading.enumerate()) <= before
