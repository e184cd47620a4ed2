"""Real vLLM with one worker.

What it samples, who may call it, whom a request touches, what a timeout, an abort and a pause cost, what new weights
change, and what is refused.
"""

import asyncio
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
import torch
from prometheus_client.parser import text_string_to_metric_families
from watching import Call, folder, left_of, living, shared_memory, taken, until

from rl_generation.engine import Engine, RequestEngine, StreamingEngine, to_prometheus
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
)
from rl_generation.event_loop import MOST_UNREAD
from rl_generation.requests import Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.vllm import VllmEngine
from rl_generation.vllm.preparing import installed_version

TOLERANCE = 1e-4
PATIENCE_S = 300
SHORT = Sampling(max_new_tokens=3, ignore_eos=True)
LONG = Sampling(max_new_tokens=480, ignore_eos=True)
FREE = Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, seed=11, n=2, ignore_eos=True)
GREEDY = Sampling(max_new_tokens=16, temperature=0.0, top_p=0.5, ignore_eos=True)
BLOCKS = list(range(10, 110))  # a prompt that fills blocks of the prefix cache


@pytest.fixture(scope="module")
def model():
    return tiny.policy("qwen3", 0)


@pytest.fixture(scope="module")
def engine(checkpoints):
    before = taken()
    options = tiny.options(
        checkpoints("qwen3"),
        worker_extension_cls="weights_worker.WeightsWorker",
        vllm_kwargs={"block_size": 32},
    )
    engine = VllmEngine(options)
    yield engine
    processes, sockets, files = engine.process_ids, folder(engine), shared_memory(engine.process_ids)
    assert processes
    assert any(each.is_socket() for each in sockets.iterdir())
    engine.close()
    engine.close()
    assert living(processes) == []
    assert not sockets.exists()
    assert left_of(files) == set()
    assert taken() <= before
    with pytest.raises(EngineDeadError, match=r"restart\(\) makes a new one"):
        engine.generate([[5]], SHORT)
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        engine.resume()


@pytest.fixture(autouse=True)
def idle(request):
    """Each test begins and ends with an engine that has nothing to do and the weights of its checkpoint."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        until(lambda: unfinished(engine) == 0)
        assert not engine.is_paused


def unfinished(engine):
    return engine.vllm.get_num_unfinished_requests()


def generated(engine):
    return engine.metrics().generated_tokens


async def deltas(engine, prompt, sampling, **others):
    return [delta async for delta in engine.stream(prompt, sampling, **others)]


def same(rollouts, others):
    """Whether tokens and ends are the same, and logp up to the shapes of matrix products."""
    return len(rollouts) == len(others) and all(
        (a.tokens, a.finish_reason, a.stop_reason) == (b.tokens, b.finish_reason, b.stop_reason)
        and a.logp == pytest.approx(b.logp, abs=1e-5)
        for a, b in zip(rollouts, others, strict=True)
    )


def letters(tokens, tokenizer):
    """Positions of tokens that are a letter, and come for the first time."""
    return [i for i, t in enumerate(tokens) if tokenizer.decode([t]).isalpha() and t not in tokens[:i] and i > 2]


# -- What it samples -------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_likeliest_of_a_plain_forward_and_their_logp_is_at_temperature_one(engine, model):
    prompts = tiny.prompts(6)
    for prompt, rollout in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=TOLERANCE)
        assert (rollout.finish_reason, rollout.stop_reason, rollout.logp_of) == ("length", None, "sampled")
        assert rollout.version == 0


def test_logp_is_of_the_distribution_that_was_drawn_from_and_every_sample_has_its_own_seed(engine, model):
    prompts = tiny.prompts(6)
    rollouts = engine.generate(prompts, FREE)
    assert [(each.prompt_index, each.sample_index) for each in rollouts] == [(i, j) for i in range(6) for j in (0, 1)]
    assert len({each.tokens for each in rollouts}) == 12
    for rollout in rollouts:
        logits = tiny.logits(model, prompts[rollout.prompt_index], rollout.tokens)
        expected = tiny.chosen(tiny.cut_logp(logits, temperature=0.7, top_p=0.9), rollout.tokens)
        assert rollout.logp == pytest.approx(expected, abs=TOLERANCE)
        assert rollout.logp != pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=0.01)


def test_an_eos_token_ends_an_answer_is_kept_and_is_the_stop_reason(engine):
    prompts = tiny.prompts(48)
    hot = {"max_new_tokens": 48, "temperature": 2.0, "seed": 1}
    answers = engine.generate(prompts, Sampling(**hot))
    stopped = [each for each in answers if each.finish_reason == "stop"]
    assert stopped
    assert {(each.tokens[-1], each.stop_reason, each.truncated) for each in stopped} == {(tiny.EOS, tiny.EOS, False)}
    assert all(tiny.EOS not in each.tokens[:-1] for each in answers)
    on = engine.generate(prompts, Sampling(**hot, ignore_eos=True))
    assert {len(each.tokens) for each in on} == {48}
    assert any(tiny.EOS in each.tokens for each in on)


def test_a_bad_word_is_never_drawn_and_the_logp_knows(engine, model):
    (prompt,), tokenizer = tiny.prompts(1), engine.limits.tokenizer
    (free, _) = engine.generate([prompt], FREE)
    token = free.tokens[letters(free.tokens, tokenizer)[0]]
    seeded = {"max_new_tokens": 24, "seed": 11, "ignore_eos": True, "n": 4}
    for rollout in engine.generate([prompt], Sampling(**seeded, bad_words=(tokenizer.decode([token]),))):
        assert token not in rollout.tokens
        logits = tiny.logits(model, prompt, rollout.tokens)
        logits[:, token] = -math.inf
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=TOLERANCE)


# -- Whom a request touches ------------------------------------------------------------------------------------------


def test_stops_and_limits_of_one_request_do_not_touch_another(engine):
    prompts, tokenizer = tiny.prompts(1) * 5, engine.limits.tokenizer
    one = replace(FREE, n=1)
    (free,) = engine.generate(prompts[:1], [one])
    first, second = letters(free.tokens, tokenizer)[:2]
    samplings = [
        one,
        replace(one, stop=(tokenizer.decode([free.tokens[second]]),)),
        replace(one, stop_token_ids=(free.tokens[first],)),
        replace(one, max_new_tokens=2),
        replace(one, seed=12),
    ]
    answers = engine.generate(prompts, samplings)
    assert [each.tokens for each in answers[:4]] == [free.tokens[:end] for end in (24, second + 1, first + 1, 2)]
    assert [(each.finish_reason, each.stop_reason) for each in answers[:4]] == [
        ("length", None),
        ("stop", samplings[1].stop[0]),
        ("stop", free.tokens[first]),
        ("length", None),
    ]
    assert answers[4].tokens != free.tokens
    assert same(answers, [engine.generate([p], [s])[0] for p, s in zip(prompts, samplings, strict=True)])


def test_submitted_requests_share_the_batch_and_get_what_each_would_get_alone(engine):
    assert isinstance(engine, RequestEngine)
    prompts = tiny.prompts(12)
    free, greedy = Sampling(max_new_tokens=24, temperature=0.7), Sampling(max_new_tokens=8, temperature=0.0)
    samplings = [free if number % 3 else greedy for number in range(12)]
    beside = replace(FREE, max_new_tokens=100)
    streamed = Call(asyncio.run, deltas(engine, prompts[0], beside))
    with ThreadPoolExecutor(4) as threads:
        rollouts = list(
            threads.map(
                lambda number: engine.submit(prompts[number], samplings[number], seed=number).result(PATIENCE_S),
                range(12),
            )
        )
    assert streamed.join() is None
    for number, rollout in enumerate(rollouts):
        assert same([rollout], engine.generate([prompts[number]], [samplings[number].for_request(number)]))
    ends = [delta.rollout for delta in streamed.value if delta.rollout is not None]
    assert same(sorted(ends, key=lambda each: each.sample_index), engine.generate([prompts[0]], [beside]))


def test_what_happens_to_a_submitted_request_touches_no_other(engine):
    kept, cancelled = (engine.submit([5, 6], LONG, seed=seed) for seed in (1, 2))
    with pytest.raises(PromptError, match="token id 999"):
        engine.submit([999], SHORT, seed=0).result(PATIENCE_S)
    with pytest.raises(PromptError, match="submit it 2 times"):
        engine.submit([5], FREE, seed=0).result(PATIENCE_S)
    assert isinstance(engine.submit([5], LONG, seed=0, timeout_s=0.01).exception(PATIENCE_S), SampleTimeoutError)
    engine.pause(mode="keep", clear_cache=False)
    assert cancelled.cancel()
    assert not kept.done(), "the test's premise"
    engine.resume()
    (alone,) = engine.generate([[5, 6]], [replace(LONG, seed=1)])
    assert same([kept.result(PATIENCE_S)], [alone])
    until(lambda: unfinished(engine) == 0)
    engine.reset_prefix_cache()


def test_a_stop_token_ends_an_answer_and_stays_in_it(engine):
    (free,) = engine.generate([[9, 8, 7]], [Sampling(max_new_tokens=24, seed=4, ignore_eos=True)])
    stop = free.tokens[9]
    assert stop not in free.tokens[:9]
    stopping = Sampling(max_new_tokens=24, seed=4, ignore_eos=True, stop_token_ids=(stop,))
    (rollout,) = engine.generate([[9, 8, 7]], [stopping])
    assert (rollout.tokens, rollout.finish_reason, rollout.stop_reason) == (free.tokens[:10], "stop", stop)


def test_broken_logits_are_an_error_that_names_the_token_and_never_a_number_and_the_engine_recovers(engine):
    (norm,) = engine.collective_rpc("get_norm")
    engine.collective_rpc("set_norm", args=[[float("nan")] * len(norm)])
    try:
        with pytest.raises(LogpError, match=r"answer \d to prompt \d has .* nan for token \d+ at position 0"):
            engine.generate(tiny.prompts(3), FREE)
        with pytest.raises(LogpError, match="answer 0 to prompt 0 has log-probability nan"):
            engine.submit([5], SHORT, seed=0).result(PATIENCE_S)
        with pytest.raises(LogpError, match="has log-probability nan"):
            asyncio.run(deltas(engine, [5], SHORT))
    finally:
        until(lambda: unfinished(engine) == 0)
        engine.collective_rpc("set_norm", args=[norm])
        engine.reset_prefix_cache()
    assert len(engine.generate(tiny.prompts(3), SHORT)) == 3


# -- Who may call it -------------------------------------------------------------------------------------------------


def test_deltas_of_a_stream_make_the_rollout_that_generate_returns(engine):
    prompt = tiny.prompts(1)[0]
    expected = engine.generate([prompt], [FREE])
    for delta_lists in ([asyncio.run(deltas(engine, prompt, FREE))], stream_in_threads(engine, prompt, count=3)):
        for found in delta_lists:
            for sample, rollout in enumerate(expected):
                own = [delta for delta in found if delta.sample_index == sample]
                assert tuple(token for delta in own for token in delta.tokens) == rollout.tokens
                assert tuple(logp for delta in own for logp in delta.logp) == own[-1].rollout.logp
                assert [delta.rollout for delta in own[:-1]] == [None] * (len(own) - 1)
                assert (own[-1].rollout.tokens, own[-1].rollout.sample_index) == (rollout.tokens, sample)
                assert own[-1].rollout.logp == pytest.approx(rollout.logp, abs=1e-5)


def stream_in_threads(engine, prompt, *, count):
    """Each thread with a loop of its own, at the same time."""
    calls = [Call(asyncio.run, deltas(engine, prompt, FREE)) for _ in range(count)]
    assert [call.join() for call in calls] == [None] * count
    return [call.value for call in calls]


def test_threads_and_loops_share_it(engine):
    prompts = tiny.prompts(4)
    expected = [each.tokens for each in engine.generate(prompts, FREE)]
    calls = [Call(engine.generate, prompts, FREE) for _ in range(4)]

    async def inside():
        blocking = engine.generate(prompts, FREE)  # blocks this loop, and works
        both = await asyncio.gather(*(asyncio.to_thread(engine.generate, prompts, FREE) for _ in range(2)))
        return [blocking, *both]

    found = asyncio.run(inside())
    assert [call.join() for call in calls] == [None] * 4
    for rollouts in [*found, *(call.value for call in calls)]:
        assert [each.tokens for each in rollouts] == expected


def test_a_blocking_call_on_the_loop_that_it_waits_for_is_refused(engine):
    async def blocking():
        return engine.generate([[5]], SHORT)

    with pytest.raises(RuntimeError, match="was made on the event loop that it waits for"):
        asyncio.run_coroutine_threadsafe(blocking(), engine.loop).result(60)


def test_it_is_what_servers_and_trainers_ask_for(engine):
    assert isinstance(engine, Engine)
    assert isinstance(engine, StreamingEngine)
    before = engine.metrics()
    engine.generate([[5] * 20, [6] * 30], SHORT)
    after = engine.metrics()
    assert after.prompt_tokens - before.prompt_tokens == 50
    assert after.generated_tokens - before.generated_tokens == 6
    assert after.finished["length"] - before.finished.get("length", 0) == 2
    assert (after.running, after.waiting) == (0, 0)
    assert engine.generate([], SHORT) == []
    asyncio.run(engine.check_health())


def test_metrics_count_tokens_shared_prefixes_and_ends(engine):
    engine.reset_prefix_cache()
    before = engine.metrics()
    for _ in range(2):
        engine.generate([BLOCKS], Sampling(max_new_tokens=4, n=3, seed=1, ignore_eos=True))
    after = engine.metrics()
    assert after.prompt_tokens - before.prompt_tokens == 600
    assert after.cached_prompt_tokens - before.cached_prompt_tokens >= 3 * 96  # all blocks of 32, the second time
    assert after.generated_tokens - before.generated_tokens == 24
    assert after.finished["length"] - before.finished.get("length", 0) == 6
    assert (after.running, after.waiting, after.version) == (0, 0, 0)


def test_explain_says_what_it_is(engine):
    for part in (
        f"vLLM {installed_version()}, in its own processes",
        "max_model_len",
        "512 tokens",
        "sampled",
        "load_format",
    ):
        assert part in engine.explain()


# -- Aborts and timeouts ---------------------------------------------------------------------------------------------


def test_leaving_early_aborts_what_is_unfinished(engine):
    async def leave():
        stream = engine.stream([5, 6], LONG)
        async for delta in stream:
            assert delta.rollout is None
            break
        await stream.aclose()

    async def cancel():
        task = asyncio.create_task(asyncio.wait_for(asyncio.wrap_future(engine.submit([5, 6], LONG, seed=0)), 60))
        await asyncio.to_thread(until, lambda: unfinished(engine))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    before = engine.metrics().finished.get("abort", 0)
    asyncio.run(leave())
    until(lambda: unfinished(engine) == 0)
    assert asyncio.run(cancel())
    until(lambda: unfinished(engine) == 0)
    until(lambda: engine.metrics().finished["abort"] == before + 2)


def test_a_slow_consumer_gets_tokens_together_and_loses_none(engine):
    async def slowly():
        stream = engine.stream([5, 6], replace(LONG, seed=3))
        first = await anext(stream)
        until(lambda: unfinished(engine) == 0)  # nobody reads meanwhile: this loop is blocked
        return [first, *[delta async for delta in stream]]

    found = asyncio.run(slowly())
    assert len(found) <= 4 * MOST_UNREAD
    (whole,) = engine.generate([[5, 6]], [replace(LONG, seed=3)])
    assert tuple(token for delta in found for token in delta.tokens) == found[-1].rollout.tokens == whole.tokens
    assert sum((delta.logp for delta in found), ()) == found[-1].rollout.logp


def test_an_abort_ends_answers_as_they_are(engine):
    async def both():
        long = replace(LONG, seed=3)
        tasks = [asyncio.create_task(deltas(engine, [5, i], long)) for i in (6, 7)]
        start = generated(engine)
        await asyncio.to_thread(until, lambda: unfinished(engine) == 2 and generated(engine) > start + 4)
        assert await engine.abort() == 2
        return await asyncio.gather(*tasks)

    alone = engine.generate([[5, 6], [5, 7]], [replace(LONG, seed=3)] * 2)
    for found, whole in zip(asyncio.run(both()), alone, strict=True):
        rollout = found[-1].rollout
        assert (rollout.finish_reason, rollout.stop_reason, rollout.truncated) == ("abort", None, True)
        assert 0 < len(rollout.tokens) < 480
        assert rollout.tokens == whole.tokens[: len(rollout.tokens)]
        assert tuple(token for delta in found for token in delta.tokens) == rollout.tokens
        assert len(rollout.logp) == len(rollout.tokens)
    assert asyncio.run(engine.abort()) == 0


def test_an_aborted_request_that_never_ran_has_no_tokens_and_still_a_version(engine):
    engine.pause(mode="keep")
    early = engine.submit([7, 8], LONG, seed=0)
    until(lambda: unfinished(engine) == 1)
    assert asyncio.run(engine.abort()) == 1
    engine.resume()
    rollout = early.result(PATIENCE_S)
    assert (rollout.tokens, rollout.finish_reason) == ((), "abort")
    assert rollout.versions == (VersionSpan(version=0, start=0, end=0),)


def test_a_timeout_costs_one_sample(engine):
    call = Call(engine.generate, [[5, 6], [7, 8], [9]], [SHORT, LONG, SHORT], timeout_s=20.0)
    start = generated(engine)
    until(lambda: unfinished(engine) == 1 and generated(engine) > start + 8)
    engine.pause(mode="keep")  # so that no machine is fast enough for it
    error = call.join()
    engine.resume()
    assert isinstance(error, SampleTimeoutError)
    assert [each.prompt_index for each in error.rollouts] == [0, 2]
    assert [len(each.tokens) for each in error.rollouts] == [3, 3]
    (lost,) = error.timed_out
    assert (lost.prompt_index, lost.sample_index) == (1, 0)
    assert 0 < len(lost.tokens) < 480
    said = str(error)
    assert f"sample 0 of prompt 1 was aborted after 20 seconds, having reached {len(lost.tokens)} tokens" in said
    assert "NRL_VLLM_ASYNC_TIMEOUT_SECONDS=40" in said


def test_each_of_n_samples_has_its_own_time(engine):
    both = Sampling(max_new_tokens=3, n=2, ignore_eos=True)
    engine.pause(mode="keep")
    with pytest.raises(SampleTimeoutError) as caught:
        engine.generate([[5, 6]], both, timeout_s=0.2)
    assert sorted(each.sample_index for each in caught.value.timed_out) == [0, 1]
    with pytest.raises(SampleTimeoutError, match="having reached 0 tokens, and so did 1 other"):
        asyncio.run(deltas(engine, [5, 6], both, timeout_s=0.2))
    engine.resume()


def test_an_interrupt_of_who_waits_aborts_what_was_asked_for_and_touches_no_other(engine):
    kept = engine.submit([5, 6], LONG, seed=1)
    engine.pause(mode="keep", clear_cache=False)  # so that no machine is fast enough
    interrupt = Call(lambda: until(lambda: unfinished(engine) == 3) and os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[7], [8]], LONG)
    assert interrupt.join() is None
    until(lambda: unfinished(engine) == 1)
    engine.resume()
    assert len(kept.result(PATIENCE_S).tokens) == 480
    assert len(engine.generate([[5]], SHORT)) == 1


def test_an_engine_that_hangs_is_found_out(engine):
    (core, *_) = engine.process_ids
    os.kill(core, signal.SIGSTOP)
    try:
        with pytest.raises(SampleTimeoutError, match="having reached 0 tokens"):
            engine.generate([[5]], SHORT, timeout_s=0.5)
        with pytest.raises(EngineDeadError, match=r"did not answer check_health within 0\.5 seconds, though"):
            asyncio.run(engine.check_health(timeout_s=0.5))
        with pytest.raises(EngineDeadError, match=r"did not answer pause within 0\.5 seconds"):
            engine.pause(timeout_s=0.5)
    finally:
        os.kill(core, signal.SIGCONT)
    engine.resume()
    assert len(engine.generate([[5]], SHORT)) == 1


# -- Pauses and new weights ------------------------------------------------------------------------------------------


def test_what_is_kept_goes_on_with_the_new_weights_and_says_so(engine, model):
    call = Call(engine.generate, [[5, 6, 7]], LONG)
    start = generated(engine)
    until(lambda: generated(engine) > start + 8)
    engine.pause(mode="keep")
    assert engine.is_paused
    assert engine.collective_rpc("scale_norm", args=[0.5]) == [[0, 0.5]]
    engine.commit_version(7)
    engine.resume()
    assert call.join() is None
    (rollout,) = call.value
    engine.collective_rpc("scale_norm", args=[2.0])
    engine.commit_version(0)
    old, new = rollout.versions
    assert (old.version, new.version, old.start, old.end, new.end) == (0, 7, 0, new.start, 480)
    assert 8 < new.start < 480
    assert rollout.version == 0
    logits = tiny.logits(model, [5, 6, 7], rollout.tokens)
    expected = torch.cat([logits[: new.start], 0.5 * logits[new.start :]]).log_softmax(-1)
    assert rollout.logp == pytest.approx(tiny.chosen(expected, rollout.tokens), abs=TOLERANCE)


def test_what_is_waited_for_ends_with_the_weights_that_it_began_with(engine):
    call = Call(engine.generate, [[5, 6, 7]], LONG)
    until(lambda: unfinished(engine))
    engine.pause(mode="wait")
    assert unfinished(engine) == 0
    later = Call(engine.generate, [[5, 6, 7]], SHORT)
    engine.commit_version(1)
    engine.resume()
    assert (call.join(), later.join()) == (None, None)
    assert call.value[0].versions == (VersionSpan(version=0, start=0, end=480),)
    assert later.value[0].versions == (VersionSpan(version=1, start=0, end=3),)
    engine.commit_version(0)


def test_what_is_aborted_by_a_pause_is_handed_back(engine):
    call = Call(engine.generate, [[5, 6, 7]], LONG)
    start = generated(engine)
    until(lambda: generated(engine) > start)
    engine.pause(mode="abort")
    assert call.join() is None
    engine.resume()
    assert call.value[0].finish_reason == "abort"
    assert 0 < len(call.value[0].tokens) < 480


def test_weights_that_the_extension_changed_are_used_once_they_are_committed(engine, model):
    prompts = [BLOCKS, BLOCKS[:40]]
    before = engine.generate(prompts, GREEDY)
    (norm,) = engine.collective_rpc("get_norm")
    assert engine.collective_rpc("scale_norm", args=(1.5,)) == [[0, 1.5]]
    engine.commit_version(8)
    after = engine.generate(prompts, GREEDY)
    changed = tiny.policy("qwen3", 0)
    changed.model.norm.weight.mul_(1.5)
    for prompt, old, new in zip(prompts, before, after, strict=True):
        expected = tiny.logits(changed, prompt, new.tokens).log_softmax(-1)
        assert new.logp == pytest.approx(tiny.chosen(expected, new.tokens), abs=TOLERANCE)
        assert new.logp != pytest.approx(old.logp, abs=1e-2)
        assert new.versions == (VersionSpan(version=8, start=0, end=16),)
    engine.collective_rpc("set_norm", args=(norm,))
    engine.commit_version(0)
    assert same(engine.generate(prompts, GREEDY), before)


def test_a_sleeping_engine_refuses_and_after_level_two_wants_a_refit(engine):
    """vLLM on a CPU answers the calls, and frees nothing."""
    engine.commit_version(5)
    engine.sleep(level=1)
    with pytest.raises(ModelError, match="the engine sleeps"):
        engine.generate([[5]], SHORT)
    engine.wake_up()
    assert engine.generate([[5]], SHORT)[0].version == 5
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    assert engine.version == 5
    with pytest.raises(ModelError, match="slept at level 2, and no refit has been committed since"):
        engine.generate([[5]], SHORT)
    engine.commit_version(0)
    assert engine.generate([[5]], SHORT)[0].version == 0
    engine.pause(mode="keep")
    kept = engine.submit([5], SHORT, seed=0)
    until(lambda: unfinished(engine) == 1)
    with pytest.raises(ModelError, match="requests are under way"):
        engine.sleep()
    engine.resume()
    assert len(kept.result(PATIENCE_S).tokens) == 3


def test_versions_that_a_refit_tells_vllm_alone_are_the_engines_too(engine):
    def tell(version):
        asyncio.run_coroutine_threadsafe(engine.vllm.update_weight_version(version), engine.loop).result(60)

    tell("12")
    assert engine.version == 12
    assert engine.generate([[5]], SHORT)[0].version == 12
    with pytest.raises(ModelError, match="labelled 'newest', which is no number of optimizer steps"):
        tell("newest")
    assert engine.version == 12
    engine.commit_version(0)


def test_an_answer_says_which_weights_made_which_of_its_tokens(engine):
    def tell(version):
        asyncio.run_coroutine_threadsafe(engine.vllm.update_weight_version(str(version)), engine.loop).result(60)

    async def read():
        seams, received, last = [], 0, None
        async for delta in engine.stream([5, 6], LONG):
            received, last = received + len(delta.tokens), delta.rollout
            if len(seams) < 2 and received > 40 * (len(seams) + 1):
                await asyncio.to_thread(engine.pause, mode="keep")
                seams.append(received)  # and what is still on its way
                await asyncio.to_thread(tell, 20 + len(seams))
                await asyncio.to_thread(engine.resume)
        return seams, last

    seams, rollout = asyncio.run(read())
    beside = engine.generate([[5]], SHORT)[0]
    tell(0)
    spans = rollout.versions
    assert [span.version for span in spans] == [0, 21, 22]
    assert (spans[0].start, spans[2].end) == (0, 480)
    for seam, before, after in zip(seams, spans[:2], spans[1:], strict=True):
        assert before.end == after.start
        assert seam <= before.end < 480
    assert beside.versions == (VersionSpan(version=22, start=0, end=3),)


def test_a_commit_under_unfinished_requests_is_refused(engine):
    call = Call(engine.generate, [[5, 6, 7]], LONG)
    start = generated(engine)
    until(lambda: generated(engine) > start)
    with pytest.raises(ModelError, match="requests under way"):
        engine.commit_version(3)
    assert call.join() is None
    assert (engine.version, call.value[0].version) == (0, 0)


def test_metrics_count_what_a_call_returns_and_prometheus_reads_them(engine):
    prompts, before = tiny.prompts(6), engine.metrics()
    rollouts = engine.generate(prompts, Sampling(max_new_tokens=16, n=2, seed=3))
    metrics = engine.metrics()
    assert metrics.generated_tokens - before.generated_tokens == sum(len(each.tokens) for each in rollouts)
    assert metrics.prompt_tokens - before.prompt_tokens == 2 * sum(map(len, prompts))
    assert sum(metrics.finished.values()) - sum(before.finished.values()) == len(rollouts) == 12
    text = to_prometheus(metrics, model_name='a "tiny" \\ model')
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rl_generation_generated_tokens"].type == "counter"
    assert families["rl_generation_answers_running"].type == "gauge"
    (sample,) = families["rl_generation_generated_tokens"].samples
    assert (sample.value, sample.labels) == (metrics.generated_tokens, {"model_name": 'a "tiny" \\ model'})
    finished = {each.labels["finish_reason"]: each.value for each in families["rl_generation_answers_finished"].samples}
    assert {reason: count for reason, count in finished.items() if count} == metrics.finished


# -- Refusals --------------------------------------------------------------------------------------------------------


def test_nothing_is_begun_before_everything_is_checked(engine):
    before = generated(engine)
    for prompts, sampling, message in (
        ([[5], []], SHORT, "prompt 1 is empty"),
        ([[5], [260]], SHORT, "token id 260"),
        ([[5], [6] * 600], SHORT, "max_model_len=512"),
        ([[5]], [SHORT, SHORT], "got 2 for 1 prompts"),
        ([[5]], Sampling(max_new_tokens=3, temperature=2.5), "vLLM goes up to 2"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.generate(prompts, sampling)
    with pytest.raises(PromptError, match="prompt 0 is empty"):
        engine.stream([], SHORT)
    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(EngineOptionError, match="positive, finite number of seconds"):
            engine.generate([[5]], SHORT, timeout_s=timeout_s)
    with pytest.raises(EngineOptionError, match="mode must be 'wait', 'keep' or 'abort'"):
        engine.pause(mode="refuse")
    with pytest.raises(EngineOptionError, match="level 1 or 2; got level=3"):
        engine.sleep(level=3)
    for version in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"at least 0; got version={version}"):
            engine.commit_version(version)
    with pytest.raises(EngineOptionError, match=r"an adapter is a LoraAdapter\(.*; got 'queries'"):
        engine.generate([[5]], SHORT, lora="queries")
    assert generated(engine) == before


def test_whoever_vouches_for_the_weights_is_asked_each_time(engine):
    def refuse():
        raise ModelError("torn")

    engine.ready = refuse
    try:
        with pytest.raises(ModelError, match="torn"):
            engine.generate([[5]], SHORT)
        with pytest.raises(ModelError, match="torn"):
            engine.stream([5], SHORT)
    finally:
        engine.ready = None
    assert len(engine.generate([[5]], SHORT)) == 1


@pytest.mark.parametrize("value", ["0", "-5", "inf", "nan", "ten", ""])
def test_a_timeout_that_is_no_time_is_refused_before_anything_starts(checkpoints, monkeypatch, value):
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", value)
    with pytest.raises(EngineOptionError, match=f"NRL_VLLM_ASYNC_TIMEOUT_SECONDS must be .*; got '{value}'"):
        VllmEngine(tiny.options(checkpoints("qwen3")))
