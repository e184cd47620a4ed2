"""Claims about pass@k, cons@k and intervals: they are what listing every subset gives, and hold what they promise."""

import itertools
import math
import random
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.estimates import Estimate, majority_at_k, pass_at_k

samples = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1, max_size=7)


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_pass_at_k_is_the_mean_over_all_subsets_and_never_falls_with_k(passed):
    found = []
    for k in range(1, len(passed) + 1):
        subsets = fmean(any(subset) for subset in itertools.combinations(passed, k))
        found.append(pass_at_k(len(passed), num_passed=sum(passed), k=k))
        assert found[-1] == pytest.approx(subsets, abs=1e-12)
    assert found == sorted(found)
    assert found[0] == pytest.approx(fmean(passed))
    assert found[-1] == float(any(passed))


def vote(answers, passed, subset):
    """Who wins among `subset`, read aloud: a winner passes as often as all samples of that answer do."""
    votes = Counter(answers[index] for index in subset if answers[index] is not None)
    best = [answer for answer, number in votes.items() if number == max(votes.values())]
    rate = {a: fmean(p for b, p in zip(answers, passed, strict=True) if a == b) for a in best}
    return fmean(rate.values()) if best else 0.0


@given(samples)
def test_cons_at_k_is_the_mean_over_all_subsets_whatever_ties_and_abstains(drawn):
    answers, passed = zip(*drawn, strict=True)
    for k in range(1, len(answers) + 1):
        subsets = fmean(vote(answers, passed, s) for s in itertools.combinations(range(len(answers)), k))
        assert majority_at_k(answers, passed=passed, k=k) == pytest.approx(subsets, abs=1e-12)


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_samples_and_the_names_of_answers_do_not_matter(drawn, shuffle):
    other = [(None if answer is None else ord(answer), passed) for answer, passed in drawn]
    shuffle.shuffle(other)
    for k in (1, len(drawn)):
        assert majority(drawn, k) == pytest.approx(majority(other, k), abs=1e-12)


def majority(pairs, k):
    answers, passed = zip(*pairs, strict=True)
    return majority_at_k(answers, passed=passed, k=k)


@given(samples)
def test_a_vote_of_one_is_a_sample_with_an_answer(drawn):
    answers, passed = zip(*drawn, strict=True)
    right = fmean(good and answer is not None for answer, good in drawn)
    assert majority_at_k(answers, passed=passed, k=1) == pytest.approx(right)


def test_large_counts_neither_overflow_nor_lose_a_vote():
    answers = ["right"] * 700 + ["wrong"] * 500 + [None] * 300
    passed = [answer == "right" for answer in answers]
    found = [majority_at_k(answers, passed=passed, k=k) for k in (1, 9, 33, 1500)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(700 / 1500)
    assert found[-1] == pytest.approx(1.0)
    assert majority_at_k(answers, passed=[not good for good in passed], k=33) < 1 - found[2]  # no vote is no pass


@pytest.mark.parametrize("k", [0, 5])
def test_more_answers_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k} must be between 1 and the 4 samples"):
        pass_at_k(4, num_passed=1, k=k)
    with pytest.raises(ValueError, match=f"k={k} must be between 1 and the 4 samples"):
        majority_at_k(["a"] * 4, passed=[True] * 4, k=k)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="num_passed=5 must be between 0 and num_samples=4"):
        pass_at_k(4, num_passed=5, k=1)
    with pytest.raises(ValueError, match="passed has 1 entries, and there are 2 answers"):
        majority_at_k(["a", "b"], passed=[True], k=1)


# -- Intervals -----------------------------------------------------------------------------------------------------


def test_with_one_sample_a_prompt_the_standard_error_is_that_of_a_mean():
    estimate = Estimate.over_prompts([1.0, 0.0, 0.0, 3.0], num_samples=4)
    assert estimate.mean == 1.0
    assert estimate.standard_error == pytest.approx(math.sqrt(2) / 2)
    assert (estimate.low + estimate.high) / 2 == pytest.approx(1.0)  # beyond [0, 1]: symmetric
    assert estimate.high - 1.0 == pytest.approx(3.182 * estimate.standard_error, rel=0.01)  # Student, 3 degrees


def test_many_prompts_of_one_sample_give_the_interval_of_wilson():
    # 300 of 1000: (0.2724, 0.3291) by Wilson's formula with z = 1.96.
    estimate = Estimate.over_prompts([1.0] * 300 + [0.0] * 700, num_samples=1000)
    assert (estimate.low, estimate.high) == pytest.approx((0.2724, 0.3291), abs=2e-4)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20), st.sampled_from([0.8, 0.95, 0.99]))
def test_an_interval_of_shares_holds_its_mean_and_stays_inside(passed, confidence):
    values = [number / 4 for number in passed]
    estimate = Estimate.over_prompts(values, num_samples=4 * len(values), confidence=confidence)
    assert 0.0 <= estimate.low <= estimate.mean + 1e-12
    assert estimate.mean - 1e-12 <= estimate.high <= 1.0
    assert estimate.high - estimate.low > 0.0
    flipped = Estimate.over_prompts([1 - value for value in values], num_samples=4 * len(values), confidence=confidence)
    assert (1 - flipped.high, 1 - flipped.low) == pytest.approx((estimate.low, estimate.high), abs=1e-9)


def test_one_prompt_has_a_mean_and_no_interval():
    estimate = Estimate.over_prompts([0.5], num_samples=64)
    assert estimate.mean == 0.5
    assert all(map(math.isnan, (estimate.standard_error, estimate.low, estimate.high)))
    assert math.isnan(Estimate.over_prompts([], num_samples=0).mean)


@pytest.mark.parametrize("samples_per_prompt", [1, 4])
@pytest.mark.parametrize(("num_prompts", "difficulty"), [(5, (1, 1)), (30, (0.3, 2)), (30, (20, 1)), (100, (1, 1))])
def test_intervals_hold_the_truth_as_often_as_they_say(num_prompts, difficulty, samples_per_prompt):
    """Prompts are drawn anew each time, each with its own rate: what an interval blind to prompts would miss."""
    draw, hits, evaluations = random.Random(0), 0, 600
    truth = difficulty[0] / sum(difficulty)
    for _ in range(evaluations):
        rates = [draw.betavariate(*difficulty) for _ in range(num_prompts)]
        values = [fmean(draw.random() < rate for _ in range(samples_per_prompt)) for rate in rates]
        estimate = Estimate.over_prompts(values, num_samples=num_prompts * samples_per_prompt)
        hits += estimate.low <= truth <= estimate.high
    assert hits / evaluations > 0.92


def test_ignoring_that_samples_share_a_prompt_would_promise_too_much():
    draw, hits = random.Random(1), 0
    for _ in range(400):
        values = [float(draw.random() < 0.5) for _ in range(30)]  # each prompt always or never right, 16 times
        pooled = Estimate.over_prompts([value for value in values for _ in range(16)], num_samples=480)
        hits += pooled.low <= 0.5 <= pooled.high
    assert hits / 400 < 0.5


@pytest.mark.parametrize(
    ("answers", "k"),
    [
        ([1] * 128 + [2] * 128, 128),
        ([1] * 512, 512),
        (list(range(512)), 256),
        ([answer for answer in range(32) for _ in range(answer)], 256),
    ],
)
def test_hundreds_of_samples_are_voted_on_too(answers, k):
    """Every answer passes, so whichever wins does."""
    assert majority_at_k(answers, passed=[True] * len(answers), k=k) == pytest.approx(1.0, abs=1e-9)
