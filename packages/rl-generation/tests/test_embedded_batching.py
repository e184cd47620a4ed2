import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from stepwise import Steps

from rl_generation import Sampling, TransformersEngine

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5, 6], [9], [1, 22, 30, 4], [1, 5, 6], [8, 8]]
STOPS = [2, 11, 12, 13]


def engine(model, **options):
    options = {"stop_token_ids": STOPS, "pad_token_id": 0, "continuous_batching": "required"} | options
    return Steps(TransformersEngine(model, **options))


def finish(served):
    """Step to the end; return rollouts, and the tokens and logp that were streamed, by (request, sample)."""
    rollouts, streamed = {}, {}
    while served.has_unfinished_requests():
        for request_id, delta in served.step():
            key = (request_id, delta.sample_index)
            tokens, logp = streamed.setdefault(key, ([], []))
            tokens += delta.tokens
            logp += delta.logp
            if delta.rollout is not None:
                rollouts[key] = delta.rollout
    return rollouts, streamed


@pytest.fixture(scope="module")
def qwen3(tiny):
    return tiny("qwen3")


REQUESTS = st.tuples(
    st.lists(st.integers(0, 39), min_size=1, max_size=12),
    st.builds(
        Sampling,
        max_new_tokens=st.integers(1, 20),
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 0.5, 1.0]),
        top_p=st.sampled_from([0.8, 1.0]),
        top_k=st.sampled_from([0, 6]),
        min_p=st.sampled_from([0.0, 0.05]),
        stop_token_ids=st.lists(st.integers(0, 39), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        seed=st.integers(0, 2**40),
    ),
)


# The same examples in every run: a draw at the edge between two tokens may go either way by rounding (`companies`).
@settings(derandomize=True, max_examples=8)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6),
    max_batch_size=st.integers(1, 6),
    max_cache_tokens=st.sampled_from([34, 60, 4000]),
)
def test_each_request_is_answered_as_if_it_were_alone(qwen3, requests, max_batch_size, max_cache_tokens):
    served = engine(qwen3, max_batch_size=max_batch_size, max_cache_tokens=max_cache_tokens)
    together = served.generate([prompt for prompt, _ in requests], [sampling for _, sampling in requests])
    alone = engine(qwen3)
    for index, (prompt, sampling) in enumerate(requests):
        answers = [rollout for rollout in together if rollout.prompt_index == index]
        expected = alone.generate([prompt], [sampling])
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        for answer, other in zip(answers, expected, strict=True):
            assert answer.logp == pytest.approx(other.logp, abs=2e-5)
            assert (answer.finish_reason, answer.stop_reason) == (other.finish_reason, other.stop_reason)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_n_answers_are_those_of_n_requests_with_the_next_seeds(qwen3, temperature):
    served = engine(qwen3)
    answers = served.generate([[1, 5, 6]], Sampling(max_new_tokens=12, n=8, seed=5, temperature=temperature))
    one = Sampling(max_new_tokens=12, seed=5, temperature=temperature)
    expected = served.generate([[1, 5, 6]] * 8, [dataclasses.replace(one, seed=5 + j) for j in range(8)])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [(answer.prompt_index, answer.sample_index) for answer in answers] == [(0, j) for j in range(8)]
    assert len({answer.tokens for answer in answers}) == (1 if temperature == 0 else 8)


def test_rows_are_replaced_while_others_go_on(qwen3):
    served = engine(qwen3, max_batch_size=2, stop_token_ids=[])
    for index, limit in enumerate([30, 2, 2, 2, 2]):
        served.add_request(str(index), [1, 5, index], Sampling(max_new_tokens=limit, seed=0))
    ended = []
    while served.has_unfinished_requests():
        ended += [request_id for request_id, delta in served.step() if delta.rollout is not None]
    assert ended == ["1", "2", "3", "4", "0"]


def test_a_prompt_is_prefilled_once_for_all_of_its_answers(qwen3):
    fed = []
    handle = qwen3.register_forward_pre_hook(lambda _, __, inputs: fed.append(inputs["input_ids"]), with_kwargs=True)
    served = engine(qwen3, stop_token_ids=[])
    fed.clear()
    served.generate([[1, 5, 6, 7], [1, 8], [1, 5, 6, 7]], Sampling(max_new_tokens=2, n=4, seed=0))
    handle.remove()
    assert fed[0].tolist() == [[1, 5, 6, 7], [1, 8, 0, 0]]
    assert [tuple(tokens.shape) for tokens in fed[1:]] == [(16, 1)], (
        "twelve rows, and four empty ones that make a round number"
    )
    metrics = served.metrics()
    assert metrics.prompt_tokens == 8 * 4 + 4 * 2
    assert metrics.cached_prompt_tokens == 7 * 4 + 3 * 2
    assert metrics.generated_tokens == 24


def test_an_answer_that_comes_later_copies_the_prompt_of_one_that_is_still_there(qwen3):
    sampling = Sampling(max_new_tokens=12, n=6, seed=0)
    expected = engine(qwen3, stop_token_ids=[]).generate([[1, 5, 6, 7]], sampling)
    served = engine(qwen3, stop_token_ids=[], max_batch_size=4)
    # Two of other lengths, so that places become free while four of the prompt's answers are under way.
    served.add_request("short", [9, 9], Sampling(max_new_tokens=2, seed=0))
    served.add_request("group", [1, 5, 6, 7], sampling)
    rollouts, _ = finish(served)
    for index, rollout in enumerate(expected):
        assert rollouts["group", index].tokens == rollout.tokens
        assert rollouts["group", index].logp == pytest.approx(rollout.logp, abs=1e-5)
    metrics = served.metrics()
    assert metrics.prompt_tokens == 2 + 6 * 4
    assert metrics.cached_prompt_tokens == 2 * 4 + 3 * 3, "two are let in with the first; three copy all but a token"
    assert metrics.finished == {"length": 7}


@pytest.mark.parametrize("max_cache_tokens", [40, 64, 100])
def test_the_cache_stays_within_its_bound_and_rows_that_give_way_lose_nothing(qwen3, max_cache_tokens):
    sampling = Sampling(max_new_tokens=30, seed=3)
    expected = engine(qwen3, stop_token_ids=[]).generate(PROMPTS, sampling)
    served = engine(qwen3, stop_token_ids=[], max_cache_tokens=max_cache_tokens)
    cache, largest = served._runner._model.cache, []
    handle = qwen3.register_forward_pre_hook(lambda *_: largest.append(cache.slots * cache.columns))
    for index, (prompt, how) in enumerate(zip(PROMPTS, sampling.spread(len(PROMPTS)), strict=True)):
        served.add_request(str(index), prompt, how)
    rollouts, streamed = finish(served)
    handle.remove()
    assert max(largest) <= max_cache_tokens
    assert (served.metrics().preemptions > 0) == (max_cache_tokens > 64)
    for index, rollout in enumerate(expected):
        answer = rollouts[str(index), 0]
        assert answer.tokens == rollout.tokens == tuple(streamed[str(index), 0][0])
        assert answer.logp == pytest.approx(rollout.logp, abs=2e-5)


def test_a_step_returns_every_new_token_once(qwen3):
    served = engine(qwen3)
    for index, prompt in enumerate(PROMPTS):
        served.add_request(str(index), prompt, Sampling(max_new_tokens=12, n=2, seed=index))
    rollouts, streamed = finish(served)
    assert len(rollouts) == 2 * len(PROMPTS)
    for key, rollout in rollouts.items():
        assert (tuple(streamed[key][0]), tuple(streamed[key][1])) == (rollout.tokens, rollout.logp)
    assert served.step() == []
    assert served.metrics().running == 0


def test_an_aborted_request_returns_what_it_has_and_leaves_the_others_alone(qwen3):
    sampling = Sampling(max_new_tokens=20, seed=0)
    (expected,) = engine(qwen3, stop_token_ids=[]).generate([[1, 5, 6]], sampling)
    served = engine(qwen3, stop_token_ids=[], max_batch_size=2)
    served.add_request("kept", [1, 5, 6], sampling)
    served.add_request("aborted", [1, 5, 6], sampling)
    served.add_request("waiting", [1, 7], sampling)
    for _ in range(4):
        served.step()
    for request_id in ("aborted", "waiting", "unknown"):
        served.abort_request(request_id)
    rollouts, _ = finish(served)
    assert rollouts["kept", 0].tokens == expected.tokens
    begun, unbegun = rollouts["aborted", 0], rollouts["waiting", 0]
    assert (begun.finish_reason, begun.stop_reason, begun.tokens) == ("abort", None, expected.tokens[:4])
    assert begun.truncated
    assert (unbegun.finish_reason, unbegun.tokens, unbegun.logp) == ("abort", (), ())
    assert len(unbegun.versions) == 1
    assert served.metrics().finished == {"length": 1, "abort": 2}


def test_ignore_eos_goes_past_the_engines_stops_and_not_past_its_own(qwen3):
    free = engine(qwen3, stop_token_ids=[]).generate([[8, 8]], Sampling(max_new_tokens=20, temperature=0))[0].tokens
    served = engine(qwen3, stop_token_ids=[free[2]])
    stopped, gone_past, own = served.generate(
        [[8, 8]] * 3,
        [
            Sampling(max_new_tokens=20, temperature=0),
            Sampling(max_new_tokens=20, temperature=0, ignore_eos=True),
            Sampling(max_new_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=(free[2],)),
        ],
    )
    end = free.index(free[2]) + 1
    assert stopped.tokens == own.tokens == free[:end]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free[2])
    assert gone_past.tokens == free
    assert (gone_past.finish_reason, gone_past.stop_reason) == ("length", None)


def test_weights_that_change_underway_are_recorded_token_by_token(tiny):
    model, newer = tiny("qwen3"), tiny("qwen3", seed=1)
    served = engine(model, stop_token_ids=[], version=3)
    sampling = Sampling(max_new_tokens=10, n=2, seed=0)
    before = engine(tiny("qwen3"), stop_token_ids=[]).generate([[1, 5, 6]], sampling)
    served.add_request("old", [1, 5, 6], sampling)
    for _ in range(4):
        served.step()
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), newer.parameters(), strict=True):
            mine.copy_(theirs)
    served.commit_version(4)
    # The same prompt: its keys in the cache are of the old weights, and must not be shared.
    served.add_request("new", [1, 5, 6], sampling)
    rollouts, _ = finish(served)
    for index in range(2):
        spans = [(span.version, span.start, span.end) for span in rollouts["old", index].versions]
        assert spans == [(3, 0, 4), (4, 4, 10)]
        assert rollouts["old", index].version == 3
        assert rollouts["old", index].tokens[:4] == before[index].tokens[:4]
        assert rollouts["old", index].tokens != before[index].tokens
    after = engine(newer, stop_token_ids=[]).generate([[1, 5, 6]], sampling)
    for index, rollout in enumerate(after):
        assert rollouts["new", index].tokens == rollout.tokens
        assert rollouts["new", index].logp == pytest.approx(rollout.logp, abs=1e-5)
        assert [(span.version, span.start, span.end) for span in rollouts["new", index].versions] == [(4, 0, 10)]


def test_long_prompts_do_not_keep_the_batch_from_filling(tiny, monkeypatch):
    monkeypatch.setattr("rl_generation.embedded.continuous_batching.MAX_PREFILL_TOKENS", 8)
    served = engine(tiny("llama", num_hidden_layers=1), stop_token_ids=[], max_batch_size=40)
    for index in range(40):
        served.add_request(str(index), [1, 5, 6, index], Sampling(max_new_tokens=50, seed=index))
    for _ in range(20):
        served.step()
    assert served.metrics().running == 40


def test_no_forward_over_prompts_is_larger_than_its_budget(tiny, monkeypatch):
    monkeypatch.setattr("rl_generation.embedded.continuous_batching.MAX_PREFILL_TOKENS", 12)
    model, fed = tiny("llama", num_hidden_layers=1), []
    served = engine(model)
    model.register_forward_pre_hook(lambda _, __, inputs: fed.append(inputs["input_ids"].shape), with_kwargs=True)
    served.generate([[1, 5, 6, token] for token in range(10)], Sampling(max_new_tokens=2, seed=0))
    assert max(rows * columns for rows, columns in fed if columns > 1) == 12


def test_an_answer_that_copied_its_prompt_ends_though_others_came_before_its_first_token(qwen3):
    served = engine(qwen3, stop_token_ids=[])
    for names in ("a", "bc", "d"):
        for name in names:
            prompt = [1, 5, 6] if name in "ab" else [1, ord(name) % 40]
            served.add_request(name, prompt, Sampling(max_new_tokens=8, seed=0))
        served.step()
    rollouts, _ = finish(served)
    assert len(rollouts) == 4


def test_an_answer_that_ends_with_others_beside_it_is_counted_once(qwen3):
    served = engine(qwen3, stop_token_ids=[], max_batch_size=16)
    limits = [2] + [6] * 15  # one hole in sixteen is left open
    samplings = [Sampling(max_new_tokens=limit, seed=0) for limit in limits]
    rollouts = served.generate([[1, index] for index in range(16)], samplings)
    assert served.metrics().generated_tokens == sum(len(rollout.tokens) for rollout in rollouts) == sum(limits)


def crowded(model, **options):
    """An engine whose cache is too small for its four requests, stepped until one has given up its place."""
    served, streamed = engine(model, stop_token_ids=[], max_cache_tokens=100, **options), {}
    for index in range(4):
        served.add_request(str(index), [1, 5, index], Sampling(max_new_tokens=50, seed=index))
    while not served.metrics().preemptions:
        for name, delta in served.step():
            streamed[name] = streamed.get(name, ()) + delta.tokens
    return served, streamed


def test_who_gave_up_its_place_and_came_back_to_newer_weights_says_so(qwen3):
    served, streamed = crowded(qwen3, version=3)
    served.commit_version(4)
    rollouts, _ = finish(served)
    for index in range(4):
        old = len(streamed.get(str(index), ()))
        expected = [(3, 0, old), (4, old, 50)] if old else [(4, 0, 50)]
        assert [(span.version, span.start, span.end) for span in rollouts[str(index), 0].versions] == expected
    assert any(len(rollout.versions) == 2 for rollout in rollouts.values())


def test_who_waits_with_tokens_and_is_aborted_keeps_them(qwen3):
    served, streamed = crowded(qwen3)
    for index in range(4):
        served.abort_request(str(index))
    rollouts, _ = finish(served)
    assert {name: rollout.tokens for (name, _), rollout in rollouts.items()} == {
        str(index): streamed.get(str(index), ()) for index in range(4)
    }


@pytest.mark.parametrize(("family", "left_out"), [("llama", True), ("mistral", False), ("gemma2", False)])
def test_a_prefill_does_without_a_mask_where_that_would_be_a_plain_triangle(tiny, family, left_out):
    served = engine(tiny(family))
    served.add_request("a", [1, 5, 6], Sampling(max_new_tokens=2, seed=0))
    served.step()
    assert served._runner._model.cache.step.mask_left_out == left_out
    served.step()
    assert not served._runner._model.cache.step.mask_left_out, "rows being decoded have lengths of their own"
