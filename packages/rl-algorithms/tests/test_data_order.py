"""Claims about order: passes, resuming anywhere, and proportions that hold at every moment."""

import itertools
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.data import DataError, Mixture, ShuffledBatches, batches

SIZES = st.integers(1, 7)


def through_json(state):
    return json.loads(json.dumps(state))


@given(st.integers(1, 20), SIZES, SIZES, st.integers(0, 30), st.integers(-3, 3))
def test_a_run_that_is_taken_up_again_sees_the_same_rows(num_items, size, next_size, taken, seed):
    whole = ShuffledBatches(range(num_items), size=1, seed=seed)
    begun = ShuffledBatches(range(num_items), size=size, seed=seed)
    drawn = list(itertools.chain.from_iterable(itertools.islice(begun, taken)))
    again = ShuffledBatches(range(num_items), size=next_size, seed=seed)  # the size may change, the order does not
    again.load_state(through_json(begun.state()))
    drawn += itertools.chain.from_iterable(itertools.islice(again, 9))
    assert drawn == [next(whole)[0] for _ in drawn]


def test_no_pass_repeats_the_order_of_another():
    passes = [tuple(batch) for batch in itertools.islice(batches(range(20), size=20, seed=0), 10)]
    assert len(set(passes)) == 10


def test_a_later_pass_costs_no_replay():
    begun = ShuffledBatches(range(10), size=10, seed=0)
    begun.load_state({"seed": 0, "num_items": 10, "drawn": 10**15})
    assert sorted(next(begun)) == list(range(10))


def test_the_batches_are_those_without_a_state():
    plain, with_state = batches(range(7), size=3, seed=5), ShuffledBatches(range(7), size=3, seed=5)
    assert list(itertools.islice(plain, 20)) == list(itertools.islice(with_state, 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_items": 9}, "num_items=9, and this run 10: the order would be another"),
        ({"seed": 1}, "seed=1, and this run 0"),
    ],
)
def test_a_state_of_other_data_is_refused(change, message):
    mine = ShuffledBatches(range(10), size=3, seed=0)
    with pytest.raises(DataError, match=message):
        mine.load_state({**mine.state(), **change})
    with pytest.raises(DataError, match="has no 'drawn'; it has 'seed', 'num_items'"):
        mine.load_state({"seed": 0, "num_items": 10})


def test_nothing_to_draw_from_is_refused_at_once():
    with pytest.raises(DataError, match="there are no rows"):
        batches([], size=1, seed=0)
    with pytest.raises(ValueError, match="size=0 must be >= 1"):
        batches([1], size=0, seed=0)


WEIGHTS = st.lists(st.integers(1, 50) | st.floats(0.01, 3).map(lambda w: round(w, 2)), min_size=1, max_size=5)


def mixture(weights, *, seed=0, num_items=4):
    names = [f"set {index}" for index in range(len(weights))]
    return Mixture(
        {name: [f"{name} item {k}" for k in range(num_items)] for name in names},
        weights=dict(zip(names, weights, strict=True)),
        seed=seed,
    )


@given(WEIGHTS, st.integers(0, 5))
def test_every_set_is_within_one_draw_of_its_share_at_every_moment(weights, seed):
    total = sum(Fraction(repr(float(weight))) for weight in weights)
    drawn = [0] * len(weights)
    for number, mixed in enumerate(itertools.islice(mixture(weights, seed=seed), 300), start=1):
        drawn[int(mixed.name.removeprefix("set "))] += 1
        for weight, count in zip(weights, drawn, strict=True):
            assert abs(count - number * Fraction(repr(float(weight))) / total) < 1


@given(WEIGHTS, st.integers(0, 20), st.integers(0, 3))
def test_a_mixture_that_is_taken_up_again_goes_on(weights, taken, seed):
    whole, again = mixture(weights, seed=seed), mixture(weights, seed=seed)
    list(itertools.islice(whole, taken))
    again.load_state(through_json(whole.state()))
    assert list(itertools.islice(whole, 20)) == list(itertools.islice(again, 20))


def test_each_set_is_drawn_in_passes_and_says_its_name():
    drawn = next(mixture([2, 1]).batches(size=12))
    for name, count in (("set 0", 8), ("set 1", 4)):
        items = [mixed.item for mixed in drawn if mixed.name == name]
        assert len(items) == count
        for start in range(0, count, 4):
            assert sorted(items[start : start + 4]) == [f"{name} item {k}" for k in range(4)]


def test_the_mixture_depends_on_the_seed_alone():
    def first(seed):
        return [mixed.item for mixed in itertools.islice(mixture([1, 1, 1], seed=seed, num_items=20), 30)]

    assert first(1) == first(1) != first(2)


def test_another_mixture_is_refused():
    state = mixture([2, 1]).state()
    with pytest.raises(DataError, match="the state of the data has weights="):
        mixture([1, 1]).load_state(state)
    with pytest.raises(DataError, match="the state of the data has num_items="):
        mixture([2, 1], num_items=5).load_state(state)
    mixture([4, 2]).load_state(state)  # the same proportions


@pytest.mark.parametrize(
    ("sets", "weights", "message"),
    [
        ({}, {}, "there are no sets"),
        ({"a": [1]}, {"b": 1}, r"the sets are \['a'\] and the weights are for \['b'\]"),
        ({"a": []}, {"a": 1}, "the set 'a' has no rows"),
        ({"a": [1]}, {"a": 0}, r"weights\['a'\]=0.0 must be finite and > 0"),
        ({"a": [1]}, {"a": float("inf")}, r"weights\['a'\]=inf must be finite"),
    ],
)
def test_a_mixture_of_nothing_is_refused(sets, weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(sets, weights=weights, seed=0)
