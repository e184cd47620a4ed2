"""What a request gives depends on the weights, its prompt and its Sampling alone: random companies, one embedded engine.

Tokens are compared exactly, and logp to 1e-4. The rounding of a matrix product changes with the number of rows, by about
1e-6 in a logit here, so a draw within that of the edge between two tokens may fall on either side, once in about 100,000
tokens; examples are drawn the same way in every run, and none of them is such a case.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rl_generation import Sampling, TransformersEngine

sys.path.insert(0, str(Path(__file__).parent / "vllm" / "programs"))
import families

TOLERANCE = 1e-4
LONGEST = 56  # tokens of a prompt and its answer
STORY = list(families.successors())
# All end with a whole character, since the text of an answer begins where its prompt's ends.
PROMPTS = [[1, STORY[0]], STORY[:3], STORY[:9], *([*each, STORY[9]] for each in families.prompts(4, longest=40))]
STOPS = ["e", " sold", "time, the", "é", "🙂 and", "fé s", "P!", "Once up", "zzz"]
BAD_WORDS = ["time", "and", "café", "the", "OP", "!", " sold"]
SETUPS = {
    "wide": {},
    "narrow": {"max_batch_size": 3},
    "short of cache": {"max_batch_size": 5, "max_cache_tokens": LONGEST + 12},
    "whole batches": {"continuous_batching": "off"},
}
DRAWN_ALIKE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a company is small as it is, and to make it smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=10,
)


@functools.cache
def engine(setup):
    policy = families.reciting()
    return TransformersEngine(
        policy, stop_token_ids=[families.EOS], pad_token_id=0, tokenizer=families.tokenizer(), **SETUPS[setup]
    )


def some(values, *, at_most=2):
    return st.lists(st.sampled_from(values), max_size=at_most).map(tuple)


def samplings(seeds):
    return st.builds(
        Sampling,
        max_new_tokens=st.integers(1, 14),
        n=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        top_k=st.sampled_from([0, 0, 1, 5, 40]),
        min_p=st.sampled_from([0.0, 0.0, 0.05]),
        stop_token_ids=some(STORY),
        stop=some(STOPS),
        bad_words=some(BAD_WORDS),
        ignore_eos=st.booleans(),
        seed=seeds,
    )


def requests(seeds=st.integers(0, 2**40)):
    return st.tuples(st.sampled_from(PROMPTS).map(tuple), samplings(seeds))


def companies(*, at_most=6):
    either = requests() | requests(st.none())  # one in two is unseeded, and company only
    return st.lists(either, min_size=2, max_size=at_most)


@functools.cache
def alone(prompt, sampling):
    return engine("wide").generate([prompt], [sampling])


def answers(rollouts):
    """What there is to an answer besides its logp, when it was made, and its prompt's place in the call."""
    return [replace(rollout, logp=(), timing=None, prompt_index=0) for rollout in rollouts]


def same(rollouts, expected):
    assert answers(rollouts) == answers(expected)
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.logp == pytest.approx(other.logp, abs=TOLERANCE)


def obeys(rollout, sampling):
    """An unseeded answer is its own; still it may only end, and only hold, what its own request says."""
    text = families.tokenizer().decode(rollout.tokens, skip_special_tokens=True)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (families.EOS,))}
    assert stops.isdisjoint(rollout.tokens[:-1])
    if rollout.finish_reason == "length":
        assert len(rollout.tokens) == sampling.max_new_tokens
        assert rollout.stop_reason is None
        assert not any(stop in text for stop in sampling.stop)
    elif isinstance(rollout.stop_reason, str):
        assert rollout.stop_reason in sampling.stop
        assert rollout.stop_reason in text
    else:
        assert rollout.stop_reason == rollout.tokens[-1]
        assert rollout.stop_reason in stops


def is_fixed(sampling):
    return sampling.greedy or sampling.seed is not None


@pytest.mark.parametrize("setup", SETUPS)
@DRAWN_ALIKE
@given(company=companies())
def test_an_answer_is_what_its_request_gives_alone(setup, company):
    together = engine(setup).generate([prompt for prompt, _ in company], [sampling for _, sampling in company])
    assert [(each.prompt_index, each.sample_index) for each in together] == [
        (index, sample) for index, (_, sampling) in enumerate(company) for sample in range(sampling.n)
    ]
    for index, (prompt, sampling) in enumerate(company):
        mine = [each for each in together if each.prompt_index == index]
        if is_fixed(sampling):
            same(mine, alone(prompt, sampling))
        for each in mine:
            obeys(each, sampling)


def test_rows_did_give_up_their_place_in_the_cache_meanwhile():
    served = engine("short of cache")
    before = served.metrics().preemptions
    asked = [Sampling(max_new_tokens=40, seed=seed, n=2, ignore_eos=True, stop=("P! On",)) for seed in range(4)]
    together = served.generate([STORY[:2]] * 4, asked)
    assert served.metrics().preemptions > before
    for index, sampling in enumerate(asked):
        same(together[2 * index : 2 * index + 2], alone(tuple(STORY[:2]), sampling))


arrivals = st.lists(
    st.tuples(requests(), st.integers(0, 8), st.none() | st.integers(0, 6)), min_size=2, max_size=6
)  # a request, the step at which it comes, and how many steps later it is aborted


def run(served, schedule):
    """Step through a schedule; return the deltas of each request, by its index."""
    deltas = {str(index): [] for index in range(len(schedule))}
    last = max(start + (patience or 0) for _, start, patience in schedule)
    step = 0
    while step <= last or served.has_unfinished_requests():
        for index, ((prompt, sampling), start, patience) in enumerate(schedule):
            if step == start:
                served.add_request(str(index), prompt, sampling)
            if patience is not None and step == start + patience:
                served.abort_request(str(index))
        for request_id, delta in served.step():
            deltas[request_id].append(delta)
        step += 1
    return deltas


def check_stepped(deltas, request):
    prompt, sampling = request
    for expected in alone(prompt, sampling):
        mine = [delta for delta in deltas if delta.sample_index == expected.sample_index]
        (whole,) = [delta.rollout for delta in mine if delta.rollout is not None]
        assert mine[-1].rollout is whole
        assert tuple(token for delta in mine for token in delta.tokens) == whole.tokens
        assert tuple(logp for delta in mine for logp in delta.logp) == whole.logp
        if whole.finish_reason != "abort":
            same([whole], [expected])
            continue
        generated = len(whole.tokens)
        assert whole.stop_reason is None
        assert whole.tokens == expected.tokens[:generated]
        assert whole.logp == pytest.approx(expected.logp[:generated], abs=TOLERANCE)


@pytest.mark.parametrize("setup", ["wide", "narrow", "short of cache"])
@DRAWN_ALIKE
@given(schedule=arrivals)
def test_those_that_come_and_are_aborted_midway_change_nothing(setup, schedule):
    deltas = run(engine(setup), schedule)
    for index, (request, _, patience) in enumerate(schedule):
        check_stepped(deltas[str(index)], request)
        reasons = {delta.rollout.finish_reason for delta in deltas[str(index)] if delta.rollout is not None}
        assert patience is not None or "abort" not in reasons
