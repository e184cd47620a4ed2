"""Claims about rollouts as tensors: rows picked out and put together are the same rows."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.rollouts import Rollouts, concatenate

PER_TOKEN = {"tokens": 0, "response": 0, "logp_old": 0, "versions": -1, "turns": -1, "token_rewards": 0}
PER_ROW = ("lengths", "rewards", "components", "groups", "truncated", "failed")


def make(lengths, *, groups=None, names=("a",), metrics=None, seed=0):
    """Random rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths, default=0))
    lengths = torch.tensor(lengths, dtype=torch.int64)
    filled = torch.arange(shape[1]) < lengths[:, None]
    response = filled & (torch.arange(shape[1]) > 0)
    random = torch.rand(shape, generator=generator)
    return Rollouts(
        tokens=torch.where(filled, torch.randint(1, 9, shape, generator=generator), 0),
        lengths=lengths,
        response=response,
        logp_old=torch.where(response, -random, 0.0),
        versions=torch.where(response, 3, -1),
        turns=torch.where(response, 0, -1),
        token_rewards=torch.where(response, random.double(), 0.0),
        rewards=torch.rand(shape[0], generator=generator, dtype=torch.float64),
        components=torch.rand(shape[0], len(names), generator=generator, dtype=torch.float64),
        component_names=names,
        groups=torch.arange(shape[0]) // 2 if groups is None else torch.tensor(groups),
        truncated=lengths % 2 == 0,
        failed=lengths % 3 == 0,
        answers=tuple(f"answer {row}" for row in range(shape[0])),
        failures=tuple("why" if length % 3 == 0 else None for length in lengths.tolist()),
        metrics=metrics or {},
    )


def row_of(rollouts, row):
    """All that is known of one row, without its padding and its group's number."""
    length = int(rollouts.lengths[row])
    return (
        *(getattr(rollouts, name)[row, :length].tolist() for name in PER_TOKEN),
        *(getattr(rollouts, name)[row].tolist() for name in PER_ROW if name != "groups"),
        rollouts.answers[row],
        rollouts.failures[row],
    )


def padding_is_clean(rollouts):
    padding = torch.arange(rollouts.tokens.shape[1]) >= rollouts.lengths[:, None]
    return all((getattr(rollouts, name)[padding] == value).all() for name, value in PER_TOKEN.items())


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@given(lengths=lengths, data=st.data())
def test_taken_rows_are_the_same_rows_without_the_padding_of_others(lengths, data):
    rollouts = make(lengths)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    taken = rollouts.take(torch.tensor(rows, dtype=torch.int64))
    assert [row_of(taken, row) for row in range(len(taken))] == [row_of(rollouts, row) for row in rows]
    assert taken.groups.tolist() == [int(rollouts.groups[row]) for row in rows]
    assert taken.tokens.shape[1] == max((lengths[row] for row in rows), default=0)
    mask = torch.zeros(len(lengths), dtype=torch.bool)
    mask[rows] = True
    by_mask = rollouts.take(mask)
    assert [row_of(by_mask, row) for row in range(len(by_mask))] == [row_of(rollouts, row) for row in sorted({*rows})]


@given(parts=st.lists(lengths, min_size=1, max_size=4), data=st.data())
def test_concatenated_parts_keep_their_rows_and_their_groups_apart(parts, data):
    groups = [data.draw(st.lists(st.integers(0, 2), min_size=len(part), max_size=len(part))) for part in parts]
    made = [make(part, groups=group, seed=seed) for seed, (part, group) in enumerate(zip(parts, groups, strict=True))]
    whole = concatenate(made)
    assert padding_is_clean(whole)
    assert [row_of(whole, row) for row in range(len(whole))] == [
        row_of(part, row) for part in made for row in range(len(part))
    ]
    origin = [(index, group) for index, part in enumerate(groups) for group in part]
    number = whole.groups.tolist()
    assert all(
        (number[i] == number[j]) == (origin[i] == origin[j]) for i in range(len(number)) for j in range(len(number))
    )
    assert sorted({*number}) == list(range(len({*origin})))


def test_metrics_of_parts_are_weighted_by_their_rows():
    parts = [make([2, 2, 2], metrics={"a": 1.0, "b": 5.0}), make([2], metrics={"a": 3.0})]
    assert concatenate(parts).metrics == {"a": 1.5, "b": 5.0}


def test_parts_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"part 1 has the reward components .*'b'.*, and part 0 has .*'a'"):
        concatenate([make([2]), make([2], names=("b",))])
    with pytest.raises(ValueError, match="no rollouts to concatenate"):
        concatenate([])


def test_every_field_is_taken_and_concatenated():
    other = {"component_names", "answers", "failures", "sources", "metrics", "greedy_rewards"}
    assert {field.name for field in dataclasses.fields(Rollouts)} == {*PER_TOKEN, *PER_ROW, *other}
