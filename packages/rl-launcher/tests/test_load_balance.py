"""How prompts are dispatched to engines: every prompt once, groups together, the work even."""

import pytest

from rl_generation import Sampling
from rl_launcher.ray.load_balance import split_prompts

SHORT = Sampling(max_new_tokens=4)


@pytest.mark.parametrize("num_engines", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 65])
def test_every_prompt_is_in_one_chunk(count, num_engines):
    prompts = [[1] * (1 + place % 5) + [place] for place in range(count)]
    chunks = split_prompts(prompts, [SHORT] * count, num_engines=num_engines)
    assert sorted(place for chunk in chunks for place in chunk) == list(range(count))
    assert all(chunks)


def test_one_engine_is_asked_everything_at_once():
    assert split_prompts([[1], [2], [3]], [SHORT] * 3, num_engines=1) == [(0, 1, 2)]


def test_equal_prompts_side_by_side_stay_together():
    prompts = [[1, group] for group in range(10) for _ in range(4)]
    for chunk in split_prompts(prompts, [SHORT] * 40, num_engines=3):
        groups = {place // 4 for place in chunk}
        assert len(chunk) == 4 * len(groups)


def test_the_first_shares_are_even_where_lengths_are_not():
    prompts = [[7] * (200 if place % 10 == 0 else 5) + [place] for place in range(100)]
    chunks = split_prompts(prompts, [SHORT] * 100, num_engines=2)
    first, second = (sum(len(prompts[place]) + 4 for place in chunk) for chunk in chunks[:2])
    assert abs(first - second) <= 15  # one short prompt


def test_what_is_left_for_who_is_done_first_becomes_ever_smaller():
    chunks = split_prompts([[1, place] for place in range(200)], [SHORT] * 200, num_engines=2)
    sizes = [len(chunk) for chunk in chunks[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.2 < sum(sizes) / 200 < 0.3
    assert sizes[-1] == 1


def test_longer_answers_count_as_more_work():
    samplings = [Sampling(max_new_tokens=100)] * 2 + [SHORT] * 30
    first, second = split_prompts([[place] for place in range(32)], samplings, num_engines=2)[:2]
    assert {0 in first, 1 in first} == {True, False}
    assert {0 in second, 1 in second} == {True, False}
