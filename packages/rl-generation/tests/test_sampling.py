import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_generation.requests import MAX_SEED, Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 8.0),
        ("max_new_tokens", True),
        ("n", 0),
        ("n", 1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("temperature", 0.001),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("stop_token_ids", (2, -1)),
        ("stop_token_ids", ("2",)),
        ("stop_token_ids", 2),
        ("stop", "END"),
        ("stop", ("END", "")),
        ("bad_words", (3,)),
        ("seed", -1),
        ("seed", MAX_SEED),
        ("seed", 1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("logit_bias", ((3, math.inf),)),
        ("logit_bias", ((3, math.nan),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, "1"),)),
        ("logit_bias", (3,)),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("min_new_tokens", 9),
        ("json_schema", ""),
        ("regex", 3),
        ("top_logp", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(field, value):
    with pytest.raises(ValueError, match=field) as refusal:
        Sampling(**({"max_new_tokens": 8} | {field: value}))
    assert f"{field}={value!r}" in str(refusal.value)


def test_lists_become_tuples_so_that_a_sampling_stays_what_it_was():
    stops = [2, 3]
    sampling = Sampling(max_new_tokens=1, stop_token_ids=stops, stop=["END"], bad_words=["no"])
    stops.append(4)
    assert sampling == Sampling(max_new_tokens=1, stop_token_ids=(2, 3), stop=("END",), bad_words=("no",))
    assert hash(sampling) is not None
    biased = Sampling(max_new_tokens=1, logit_bias=[[3, 1.0]])
    assert biased == Sampling(max_new_tokens=1, logit_bias={3: 1.0})
    assert hash(biased) is not None


def test_what_would_contradict_each_other_is_refused():
    with pytest.raises(ValueError, match=r"min_new_tokens must be at most max_new_tokens=4, and 0 beside stop="):
        Sampling(max_new_tokens=4, min_new_tokens=2, stop=("a",))
    with pytest.raises(ValueError, match="one grammar"):
        Sampling(max_new_tokens=4, json_schema="{}", regex="a")


def test_only_temperature_zero_is_greedy():
    assert Sampling(max_new_tokens=1, temperature=0).greedy
    assert not Sampling(max_new_tokens=1, temperature=0.01).greedy


def test_a_sampling_cannot_be_changed_or_given_by_position():
    sampling = Sampling(max_new_tokens=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3
    with pytest.raises(TypeError, match="positional"):
        Sampling(8)


@settings(deadline=None)
@given(st.integers(0, MAX_SEED - 64), st.integers(1, 64))
def test_one_seed_spread_over_prompts_gives_each_of_them_and_each_sample_another(seed, n):
    sampling = Sampling(max_new_tokens=1, n=n, seed=seed)
    spread = sampling.spread(40)
    assert spread[0] == sampling
    assert sampling.spread(12) == spread[:12]
    seeds = {each.seed + sample for each in spread for sample in range(n)}
    assert len(seeds) == 40 * n
    assert max(seeds) < MAX_SEED


def test_a_seed_leaves_room_for_all_samples():
    assert Sampling(max_new_tokens=1, n=4, seed=MAX_SEED - 4).seed == MAX_SEED - 4
    with pytest.raises(ValueError, match="n=4"):
        Sampling(max_new_tokens=1, n=4, seed=MAX_SEED - 3)


def test_what_has_no_seed_is_the_same_for_every_prompt():
    sampling = Sampling(max_new_tokens=1)
    assert sampling.spread(3) == [sampling] * 3
    assert sampling.spread(0) == []
    assert Sampling(max_new_tokens=1, seed=5).spread(0) == []
