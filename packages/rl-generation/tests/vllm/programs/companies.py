"""Requests of every kind in random company, and whether each gets what it gets alone; for any engine.

Tokens are compared exactly, and logp to 1e-4. The rounding of a matrix product changes with the number of rows, by
about 1e-6 in a logit here: a draw that falls so near to the edge between two tokens may give either, about once in
100,000 tokens. Examples are drawn the same way in every run, and none of them should be such a case on any machine.
"""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import families
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from rl_generation import Sampling

TOLERANCE = 1e-4
STORY = list(families.successors())
# All end with a whole character, where the text of an answer begins.
PROMPTS = [[1, STORY[0]], STORY[:3], STORY[:9], *([*each, STORY[9]] for each in families.prompts(4, longest=40))]
LONGEST = 56  # tokens of a prompt and its answer
STOPS = ["e", " sold", "time, the", "é", "🙂 and", "fé s", "P!", "Once up", "zzz"]
BAD_WORDS = ["time", "and", "é", "the", "STOP", "!", " sold"]


def examples(count):
    """Settings of Hypothesis: so many examples, the same in every run."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],  # a company is small as it is, and to make it smaller takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def some(values):
    return st.lists(st.sampled_from(values), max_size=2).map(tuple)


def requests(seeds):
    """A prompt and its Sampling."""
    sampling = st.builds(
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
    return st.tuples(st.sampled_from(PROMPTS), sampling)


SEEDS = st.integers(0, 2**40)
COMPANIES = st.lists(requests(SEEDS) | requests(st.none()), min_size=2, max_size=6)
"""Requests of one call."""

SCHEDULES = st.lists(
    st.tuples(requests(SEEDS), st.integers(0, 8), st.none() | st.integers(0, 6)), min_size=2, max_size=5
)
"""A request, the step before which it comes, and how many steps later it is aborted."""


def answers(rollouts):
    """What there is to an answer besides its logp, when it was made, and its prompt's place in the call."""
    return [replace(rollout, logp=(0.0,) * len(rollout.tokens), prompt_index=0) for rollout in rollouts]


def check_same(rollouts, expected):
    assert answers(rollouts) == answers(expected)
    for rollout, other in zip(rollouts, expected, strict=True):
        assert rollout.logp == pytest.approx(other.logp, abs=TOLERANCE)


def check_obeys(rollout, sampling):
    """Whatever was drawn: an answer ends by what its own request says, and no sooner."""
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


def check_company(engine, company, alone):
    """Generate all of `company` together; `alone(prompt, sampling)` is what a request gives alone."""
    together = engine.generate([prompt for prompt, _ in company], [sampling for _, sampling in company])
    assert [(each.prompt_index, each.sample_index) for each in together] == [
        (index, sample) for index, (_, sampling) in enumerate(company) for sample in range(sampling.n)
    ]
    for index, (prompt, sampling) in enumerate(company):
        mine = [each for each in together if each.prompt_index == index]
        for each in mine:
            check_obeys(each, sampling)
        if sampling.greedy or sampling.seed is not None:
            check_same(mine, alone(prompt, sampling))


def run(engine, schedule):
    """Stream through a schedule; return the deltas of each request, by its index."""
    deltas = {str(index): [] for index in range(len(schedule))}
    asyncio.run(stream(engine, schedule, deltas))
    return deltas


async def stream(engine, schedule, deltas):
    """The same with an engine that steps by itself: its steps are about a millisecond, or a delta of the request."""

    async def follow(name, prompt, sampling, start, patience):
        await asyncio.sleep(start / 1000)
        async with aclosing(engine.stream(prompt, sampling)) as answers:
            async for delta in answers:
                deltas[name].append(delta)
                if patience is not None and len(deltas[name]) >= patience:
                    break  # whose end aborts the request

    await asyncio.gather(*(follow(str(index), *request, *when) for index, (request, *when) in enumerate(schedule)))


def check_schedule(engine, schedule, alone):
    """Step through `schedule`: an answer is what its request gives alone, an aborted one the beginning of that."""
    deltas = run(engine, schedule)
    for index, ((prompt, sampling), _, patience) in enumerate(schedule):
        for expected in alone(prompt, sampling):
            mine = [each for each in deltas[str(index)] if each.sample_index == expected.sample_index]
            if not any(each.rollout is not None for each in mine):  # nobody followed it to its end
                assert patience is not None
                tokens = tuple(token for each in mine for token in each.tokens)
                assert tokens == expected.tokens[: len(tokens)]
                continue
            whole = check_deltas(mine)
            if whole.finish_reason != "abort":
                check_same([whole], [expected])
                continue
            assert patience is not None
            assert whole.stop_reason is None
            assert whole.tokens == expected.tokens[: len(whole.tokens)]
            assert whole.logp == pytest.approx(expected.logp[: len(whole.tokens)], abs=TOLERANCE)


def check_deltas(deltas):
    """Return the answer that the last one holds, and all of them are."""
    (whole,) = [delta.rollout for delta in deltas if delta.rollout is not None]
    assert deltas[-1].rollout is whole
    assert tuple(token for delta in deltas for token in delta.tokens) == whole.tokens
    assert tuple(logp for delta in deltas for logp in delta.logp) == whole.logp
    return whole
