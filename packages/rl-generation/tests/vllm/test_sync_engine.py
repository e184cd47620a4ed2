"""Real vLLM in this process: what it samples, what it says of it, whom a request touches, and what is refused."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
import torch

from rl_generation.engine import SteppingEngine
from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError, PromptError
from rl_generation.requests import Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.vllm import VllmEngine

TOLERANCE = 1e-4
PATIENCE_S = 300
FREE = Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, seed=11, ignore_eos=True)
LONG = list(range(10, 110))


class Gate:
    """What a sink's `check` is to an engine."""

    def __init__(self):
        self.error = None

    def check(self):
        if self.error is not None:
            raise self.error


@pytest.fixture(scope="module")
def gate():
    return Gate()


@pytest.fixture(scope="module")
def model():
    return tiny.policy("qwen3", 0)


@pytest.fixture(scope="module")
def engine(checkpoints, gate):
    from vllm import LLM, EngineArgs  # noqa: F401  (importing vLLM sets variables, once)

    torch.manual_seed(5)
    environment, state = dict(os.environ), torch.get_rng_state()
    options = tiny.options(
        checkpoints("qwen3"),
        worker_extension_cls="weights_worker.WeightsWorker",
        vllm_kwargs={"block_size": 32},
    )
    with VllmEngine(options, ready=gate.check, version=3) as engine:
        engine.changed = set(os.environ.items()) ^ environment.items()
        engine.drawn = not torch.equal(torch.get_rng_state(), state)
        yield engine
    with pytest.raises(EngineDeadError, match="the engine is closed"):
        engine.generate([[5]], FREE)


@pytest.fixture
def tokenizer(engine):
    return engine.limits.tokenizer


def steps(engine):
    """All deltas until nothing is under way, by request."""
    deltas = {}
    while engine.has_unfinished_requests():
        for request_id, delta in engine.step():
            deltas.setdefault(request_id, []).append(delta)
    return deltas


def same(rollouts, others):
    """Whether tokens and ends are the same, whatever the call, and logp up to the shapes of matrix products."""
    return len(rollouts) == len(others) and all(
        (a.tokens, a.finish_reason, a.stop_reason) == (b.tokens, b.finish_reason, b.stop_reason)
        and all(abs(x - y) < 1e-5 for x, y in zip(a.logp, b.logp, strict=True))
        for a, b in zip(rollouts, others, strict=True)
    )


def letters(tokens, tokenizer):
    """Positions of tokens that are a letter, and come for the first time."""
    return [i for i, t in enumerate(tokens) if tokenizer.decode([t]).isalpha() and t not in tokens[:i] and i > 2]


# -- What it samples -------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_the_likeliest_of_a_plain_forward_and_their_logp_is_at_temperature_one(engine, model):
    prompts = tiny.prompts(8)
    greedy = Sampling(max_new_tokens=16, temperature=0.0, top_p=0.5, ignore_eos=True)
    for prompt, rollout in zip(prompts, engine.generate(prompts, greedy), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=TOLERANCE)
        assert (rollout.finish_reason, rollout.stop_reason, rollout.logp_of) == ("length", None, "sampled")
        assert 0 < rollout.timing.first_token_s < rollout.timing.total_s


def test_logp_is_of_the_distribution_that_was_drawn_from(engine, model):
    prompts = tiny.prompts(16)
    for prompt, rollout in zip(prompts, engine.generate(prompts, FREE), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        expected = tiny.chosen(tiny.cut_logp(logits, temperature=0.7, top_p=0.9), rollout.tokens)
        assert rollout.logp == pytest.approx(expected, abs=TOLERANCE)
        assert rollout.logp != pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=0.01)


def test_sample_j_draws_as_a_request_of_seed_plus_j(engine):
    prompts = tiny.prompts(2)
    together = engine.generate(prompts, [Sampling(max_new_tokens=9, n=8, seed=seed) for seed in (5, 70)])
    apart = [
        engine.generate([prompt], [Sampling(max_new_tokens=9, seed=seed + j)])[0]
        for prompt, seed in zip(prompts, (5, 70), strict=True)
        for j in range(8)
    ]
    assert same(together, apart)
    assert [(each.prompt_index, each.sample_index) for each in together] == [(p, j) for p in (0, 1) for j in range(8)]
    assert len({each.tokens for each in together}) == 16


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


def test_a_bad_word_is_never_drawn_and_the_logp_knows(engine, model, tokenizer):
    (prompt,) = tiny.prompts(1)
    (free,) = engine.generate([prompt], FREE)
    token = free.tokens[letters(free.tokens, tokenizer)[0]]
    seeded = {"max_new_tokens": 24, "seed": 11, "ignore_eos": True, "n": 4}
    answers = engine.generate([prompt], Sampling(**seeded, bad_words=(tokenizer.decode([token]),)))
    for rollout in answers:
        assert token not in rollout.tokens
        logits = tiny.logits(model, prompt, rollout.tokens)
        logits[:, token] = -math.inf
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=TOLERANCE)


# -- Whom a request touches ------------------------------------------------------------------------------------------


def test_stops_and_limits_of_one_request_do_not_touch_another(engine, tokenizer):
    prompts = tiny.prompts(1) * 5
    (free,) = engine.generate(prompts[:1], [FREE])
    first, second = letters(free.tokens, tokenizer)[:2]
    plain = {"max_new_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    samplings = [
        FREE,
        Sampling(**plain, stop=(tokenizer.decode([free.tokens[second]]),)),
        Sampling(**plain, stop_token_ids=(free.tokens[first],)),
        Sampling(**plain | {"max_new_tokens": 2}),
        Sampling(**plain | {"seed": 12}),
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
    alone = [engine.generate([p], [s])[0] for p, s in zip(prompts, samplings, strict=True)]
    assert same(answers, alone)


def test_stepping_gives_the_tokens_of_generate_as_they_come(engine):
    assert isinstance(engine, SteppingEngine)
    prompts = tiny.prompts(3)
    samplings = [Sampling(max_new_tokens=length, n=2, seed=length) for length in (3, 9, 6)]
    whole = engine.generate(prompts, samplings)
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.add_request(f"request {i}", prompt, sampling)
    deltas = steps(engine)
    ends = [delta.rollout for i in range(3) for delta in deltas[f"request {i}"] if delta.rollout is not None]
    assert same(
        sorted(ends, key=lambda each: (len(each.tokens), each.sample_index)),
        sorted(whole, key=lambda each: (len(each.tokens), each.sample_index)),
    )
    for i in range(3):
        for end in (delta.rollout for delta in deltas[f"request {i}"] if delta.rollout is not None):
            mine = [delta for delta in deltas[f"request {i}"] if delta.sample_index == end.sample_index]
            assert tuple(token for delta in mine for token in delta.tokens) == end.tokens
            assert tuple(logp for delta in mine for logp in delta.logp) == end.logp


def test_submitted_requests_share_the_batch_and_get_what_each_would_get_alone(engine):
    prompts = tiny.prompts(12)
    free, greedy = Sampling(max_new_tokens=24, temperature=0.7), Sampling(max_new_tokens=8, temperature=0.0)
    samplings = [free if number % 3 else greedy for number in range(12)]
    engine.add_request("stepped", prompts[0], replace(FREE, max_new_tokens=100))
    with ThreadPoolExecutor(4) as threads:
        rollouts = list(
            threads.map(
                lambda number: engine.submit(prompts[number], samplings[number], seed=number).result(PATIENCE_S),
                range(12),
            )
        )
    (together,) = engine.generate([prompts[1]], [free.for_request(1)])
    stepped = steps(engine)["stepped"]
    assert same([together], [rollouts[1]])
    for number, rollout in enumerate(rollouts):
        assert same([rollout], engine.generate([prompts[number]], [samplings[number].for_request(number)]))
    assert same([stepped[-1].rollout], engine.generate([prompts[0]], [replace(FREE, max_new_tokens=100)]))


def test_what_happens_to_a_submitted_request_touches_no_other(engine, gate):
    kept = engine.submit(LONG[:5], Sampling(max_new_tokens=200, ignore_eos=True), seed=1)
    cancelled = engine.submit(LONG[:6], Sampling(max_new_tokens=200, ignore_eos=True), seed=2)
    while len(engine._answers) < 2:  # they are asked whether weights are ready when they are begun
        time.sleep(0.001)
    with pytest.raises(PromptError, match="token id 999"):
        engine.submit([999], FREE, seed=0).result(PATIENCE_S)
    gate.error = RuntimeError("torn")
    with pytest.raises(RuntimeError, match="torn"):
        engine.submit([5], Sampling(max_new_tokens=4), seed=0).result(PATIENCE_S)
    gate.error = None
    assert cancelled.cancel()
    with engine.between_steps():
        assert not kept.done(), "the test's premise"
        with pytest.raises(ModelError, match="in use by requests under way"):
            engine.reset_prefix_cache()
    (alone,) = engine.generate([LONG[:5]], [Sampling(max_new_tokens=200, ignore_eos=True, seed=1)])
    assert same([kept.result(PATIENCE_S)], [alone])
    assert not engine.has_unfinished_requests()
    engine.reset_prefix_cache()


def test_broken_logits_are_the_error_of_submitted_requests_and_the_engine_recovers(engine):
    (norm,) = engine.collective_rpc("get_norm")
    engine.collective_rpc("set_norm", args=([float("nan")] * len(norm),))
    with pytest.raises(LogpError, match="log-probability nan"):
        engine.submit([5], Sampling(max_new_tokens=4), seed=0).result(PATIENCE_S)
    engine.collective_rpc("set_norm", args=(norm,))
    engine.reset_prefix_cache()
    assert engine.submit([5], Sampling(max_new_tokens=4), seed=0).result(PATIENCE_S).tokens


def test_an_aborted_request_returns_what_it_has_and_its_neighbours_go_on(engine):
    prompts = tiny.prompts(3)
    alone = engine.generate(prompts, [FREE] * 3)
    for name, prompt in zip("abc", prompts, strict=True):
        engine.add_request(name, prompt, FREE)
    for _ in range(4):
        engine.step()
    with pytest.raises(PromptError, match="request 'b' is under way already"):
        engine.add_request("b", prompts[1], FREE)
    engine.abort_request("b")
    engine.abort_request("nobody's")
    deltas = steps(engine)
    (end,) = deltas["b"]
    assert (end.tokens, end.rollout.tokens, end.rollout.logp) == (
        (),
        alone[1].tokens[:4],
        pytest.approx(alone[1].logp[:4], abs=1e-5),
    )
    assert (end.rollout.finish_reason, end.rollout.stop_reason, end.rollout.truncated) == ("abort", None, True)
    assert [deltas[name][-1].rollout.tokens for name in "ac"] == [alone[0].tokens, alone[2].tokens]


def test_an_aborted_request_that_never_ran_has_no_tokens_and_still_a_version(engine):
    engine.add_request("early", [7, 8], FREE)
    engine.abort_request("early")
    ((_, delta),) = engine.step()
    assert (delta.rollout.tokens, delta.rollout.timing) == ((), None)
    assert delta.rollout.versions == (VersionSpan(version=engine.version, start=0, end=0),)
    assert not engine.has_unfinished_requests()


def test_generate_between_two_steps_takes_nothing_from_a_request_under_way(engine):
    prompts = tiny.prompts(2)
    whole = engine.generate(prompts, [FREE] * 2)
    engine.add_request("a", prompts[0], FREE)
    engine.step()
    assert same(engine.generate(prompts[1:], [FREE]), whole[1:])
    assert sum((delta.tokens for delta in steps(engine)["a"]), ()) == whole[0].tokens[1:]


# -- Versions and weights --------------------------------------------------------------------------------------------


def test_weights_that_the_extension_changed_are_used_once_they_are_committed(engine, model, checkpoints):
    prompts = [LONG, LONG[:40]]  # the first fills blocks of the prefix cache
    greedy = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    before = engine.generate(prompts, greedy)
    assert engine.collective_rpc("scale_norm", args=(1.5,)) == [[0, 1.5]]
    engine.commit_version(8)
    after = engine.generate(prompts, greedy)
    changed = tiny.policy("qwen3", 0)
    changed.model.norm.weight.mul_(1.5)
    for prompt, old, new in zip(prompts, before, after, strict=True):
        expected = tiny.logits(changed, prompt, new.tokens).log_softmax(-1)
        assert new.logp == pytest.approx(tiny.chosen(expected, new.tokens), abs=TOLERANCE)
        assert new.logp != pytest.approx(old.logp, abs=1e-2)
        assert new.versions == (VersionSpan(version=8, start=0, end=8),)
    engine.collective_rpc("set_norm", args=(model.model.norm.weight.tolist(),))
    engine.commit_version(3)
    assert same(engine.generate(prompts, greedy), before)


def test_every_token_carries_the_version_that_made_it(engine):
    engine.commit_version(20)
    engine.add_request("long", [7, 8, 9], Sampling(max_new_tokens=6, ignore_eos=True))
    engine.add_request("cut", [7, 8, 9], Sampling(max_new_tokens=60, ignore_eos=True))
    engine.step(), engine.step()
    with pytest.raises(ModelError, match="in use by requests under way"):
        engine.commit_version(21)
    engine.llm.update_weight_version("21")  # what a sink does that lets requests go on
    engine.step()
    engine.abort_request("cut")
    deltas = steps(engine)
    spans = (VersionSpan(version=20, start=0, end=2), VersionSpan(version=21, start=2, end=6))
    assert deltas["long"][-1].rollout.versions == spans
    assert deltas["cut"][-1].rollout.versions == (spans[0], VersionSpan(version=21, start=2, end=3))
    assert (deltas["long"][-1].rollout.version, engine.version) == (20, 21)
    engine.commit_version(3)


def test_a_version_that_is_no_number_of_steps_is_refused(engine):
    engine.llm.update_weight_version("step-7")
    with pytest.raises(ModelError, match="weights are labelled 'step-7', which is no number of optimizer steps"):
        engine.generate([[5]], FREE)
    for version in (-1, 1.5, True, "7"):
        with pytest.raises(ValueError, match=f"got version={version!r}"):
            engine.commit_version(version)
    engine.commit_version(3)


def test_broken_logits_are_an_error_that_names_the_token_and_the_engine_recovers(engine, model):
    broken = [math.nan] * 64
    engine.collective_rpc("set_norm", args=(broken,))
    with pytest.raises(LogpError, match=r"answer 0 to prompt 0 has log-probability nan for token \d+ at position 0"):
        engine.generate([[5, 6], [7]], [Sampling(max_new_tokens=4, n=2, seed=1)] * 2)
    engine.add_request("a", [5, 6], FREE)
    with pytest.raises(LogpError, match="answer 0 to prompt 0 has log-probability nan"):
        engine.step()
    assert not engine.has_unfinished_requests()
    assert not engine.llm.llm_engine.has_unfinished_requests()
    engine.collective_rpc("set_norm", args=(model.model.norm.weight.tolist(),))
    engine.commit_version(3)
    assert len(engine.generate([[5, 6]], FREE)[0].tokens) == 24


def test_what_says_that_weights_are_torn_is_asked_before_anything_is_generated(engine, gate):
    gate.error = RuntimeError("torn")
    try:
        for ask in (lambda: engine.generate([[5]], FREE), lambda: engine.add_request("a", [5], FREE)):
            with pytest.raises(RuntimeError, match="torn"):
                ask()
    finally:
        gate.error = None
    assert not engine.has_unfinished_requests()


def test_a_sleeping_engine_refuses_and_after_level_two_wants_a_refit(engine):
    engine.commit_version(5)
    engine.sleep(level=1)
    with pytest.raises(ModelError, match="the engine sleeps"):
        engine.generate([[5]], FREE)
    engine.wake_up()
    assert engine.generate([[5]], FREE)[0].version == 5
    engine.sleep(level=2)
    engine.wake_up(tags=["weights"])
    engine.wake_up(tags=["kv_cache"])
    assert engine.version == 5
    with pytest.raises(ModelError, match="slept at level 2, and no refit has been committed since"):
        engine.generate([[5]], FREE)
    engine.commit_version(3)
    assert engine.generate([[5]], FREE)[0].version == 3
    engine.add_request("a", [5], FREE)
    with pytest.raises(ModelError, match="requests are under way"):
        engine.sleep()
    engine.abort_request("a")
    engine.step()


# -- What it says, and refuses ---------------------------------------------------------------------------------------


def test_metrics_count_tokens_shared_prefixes_and_ends(engine):
    engine.reset_prefix_cache()
    before = engine.metrics()
    engine.generate([LONG], Sampling(max_new_tokens=4, n=3, seed=1, ignore_eos=True))
    engine.generate([LONG], Sampling(max_new_tokens=4, n=3, seed=1, ignore_eos=True))
    after = engine.metrics()
    assert after.prompt_tokens - before.prompt_tokens == 600
    assert after.cached_prompt_tokens - before.cached_prompt_tokens >= 3 * 96  # all blocks of 32, the second time
    assert after.generated_tokens - before.generated_tokens == 24
    assert after.finished["length"] - before.finished.get("length", 0) == 6
    assert (after.running, after.waiting, after.version) == (0, 0, 3)


def test_explain_says_what_it_is(engine):
    text = engine.explain()
    for part in ("vLLM, synchronous, in this process", "0.32", "max_model_len", "512 tokens", "sampled", "load_format"):
        assert part in text
    engine.check_health()


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[5], []], FREE, "prompt 1 is empty"),
        ([[5, 260]], FREE, r"prompt 0 has token id 260 at position 1; the model's vocabulary is \[0, 260\)"),
        ([[-1]], FREE, "prompt 0 has token id -1"),
        ([[1.5]], FREE, "prompt 0 must be a sequence of integer token ids"),
        (
            [[5] * 500],
            FREE,
            r"prompt 0 has 500 tokens, and with max_new_tokens=24 passes the model's max_model_len=512",
        ),
        ([[5]], Sampling(max_new_tokens=1, stop_token_ids=(260,)), r"stop_token_ids must hold ids in \[0, 260\)"),
        ([[5], [6]], [FREE], "got 1 for 2 prompts"),
        ([[5]], Sampling(max_new_tokens=1, temperature=2.5), "temperature=2.5, and vLLM goes up to 2.0"),
    ],
)
def test_bad_input_is_refused_before_vllm_sees_it(engine, prompts, sampling, message):
    with pytest.raises(PromptError, match=message):
        engine.generate(prompts, sampling)
    if len(prompts) == 1:
        with pytest.raises(PromptError, match=message):
            engine.add_request("a", prompts[0], sampling)
    assert not engine.llm.llm_engine.has_unfinished_requests()
    assert not engine.has_unfinished_requests()


def test_a_second_engine_in_process_is_refused(engine, checkpoints):
    with pytest.raises(EngineOptionError, match="of a trainer or of another engine in process"):
        VllmEngine(tiny.options(checkpoints("qwen3")))


def test_starting_leaves_the_environment_and_the_generators_of_this_process_alone(engine):
    assert (engine.changed, engine.drawn) == (set(), False)
