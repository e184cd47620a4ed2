"""Claims about the cut of a batch over ranks and microbatches."""

import dataclasses
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends import DTensorConfig
from rl_backends.batching.dealing import RowDealing
from rl_backends.batching.microbatches import row_cost, share_out
from rl_backends.errors import BatchError

WIDTH = 13


def dealing(**rules):
    """Of rank 0; the cut is that of every rank."""
    return RowDealing(rank=0, **rules)


def batch(world, lengths, *, kind="Examples", width=WIDTH):
    kind = getattr(world, kind)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    rows = len(lengths)
    return kind(
        tokens=torch.zeros(rows, width, dtype=torch.int64),
        lengths=lengths,
        trainable=(torch.arange(width) < lengths[:, None]) & (torch.arange(width) > 0),
        weight=torch.ones(rows),
    )


def tokens_read(microbatch, lengths, *, layout, multiple):
    if layout == "packed":
        return int(lengths[microbatch.rows].sum())
    return len(microbatch.rows) * multiple * -(-microbatch.width // multiple)


def load(rank, lengths):
    return sum(row_cost(int(lengths[row])) for microbatch in rank if microbatch.counted for row in microbatch.rows)


@st.composite
def questions(draw):
    kind = draw(st.sampled_from(["Examples", "Pairs"]))
    unit = 2 if kind == "Pairs" else 1
    lengths = draw(
        st.lists(st.integers(1, WIDTH), min_size=unit, max_size=12 * unit).map(
            lambda all_: all_[: len(all_) // unit * unit]
        )
    )
    multiple = draw(st.sampled_from([1, 4]))
    layout = draw(st.sampled_from(["padded", "packed"]))
    least = unit * (WIDTH + 3)
    tokens = draw(st.none() | st.integers(least, 4 * least))
    limits = {"micro_batch_size": draw(st.integers(unit, 9)), "micro_batch_tokens": tokens, "layout": layout}
    return kind, lengths, limits, draw(st.integers(1, 4)), multiple if layout == "padded" else 1


@settings(max_examples=100, deadline=None)
@given(question=questions())
def test_each_row_counts_once_within_the_limits_and_all_ranks_have_equally_many(world, question):
    kind, lengths, limits, num_ranks, multiple = question
    examples = batch(world, lengths, kind=kind)
    unit = examples.rows_per_unit
    ranks = dealing(**limits, num_ranks=num_ranks, token_multiple=multiple).cut(examples)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    counted = [row for rank in ranks for microbatch in rank if microbatch.counted for row in microbatch.rows.tolist()]
    assert sorted(counted) == list(range(len(lengths)))
    for microbatch in (microbatch for rank in ranks for microbatch in rank):
        rows = microbatch.rows.tolist()
        assert 0 < len(rows) <= limits["micro_batch_size"]
        assert microbatch.width == max(lengths[row] for row in rows)
        read = tokens_read(microbatch, examples.lengths, layout=limits["layout"], multiple=multiple)
        assert limits["micro_batch_tokens"] is None or read <= limits["micro_batch_tokens"]
        starts = rows[::unit]
        assert all(start % unit == 0 for start in starts)
        assert rows == [start + row for start in starts for row in range(unit)]
    for rank, microbatches in enumerate(ranks):
        alone = dealing(**limits, num_ranks=num_ranks, token_multiple=multiple).cut(examples)[rank]
        assert [(m.rows.tolist(), m.width, m.counted) for m in alone] == [
            (m.rows.tolist(), m.width, m.counted) for m in microbatches
        ]


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 1000), max_size=40), num_ranks=st.integers(1, 6))
def test_no_rank_is_dearer_than_the_dearest_of_units_dealt_in_turn(costs, num_ranks):
    ranks = share_out(costs, num_ranks=num_ranks)
    loads = [sum(costs[unit] for unit in units) for units in ranks]
    dealt = [sum(sorted(costs, reverse=True)[rank::num_ranks]) for rank in range(num_ranks)]
    assert max(loads) <= max(dealt)
    assert max(map(len, ranks)) <= -(-len(costs) // num_ranks)
    assert sorted(unit for units in ranks for unit in units) == list(range(len(costs)))


def test_long_and_short_rows_are_shared_out_evenly(world):
    examples = batch(world, [13, 3, 3, 3, 12, 2, 4, 4], width=13)
    ranks = dealing(micro_batch_size=8, num_ranks=2).cut(examples)
    assert [sum(examples.lengths[m.rows].sum().item() for m in rank) for rank in ranks] == [22, 22]


def test_equal_rows_make_equal_microbatches_on_every_rank(world):
    examples = batch(world, [5] * 20)
    ranks = dealing(micro_batch_size=4, num_ranks=2).cut(examples)
    assert [[len(m.rows) for m in rank] for rank in ranks] == [[4, 4, 2]] * 2


def test_rows_of_like_length_are_padded_together(world):
    examples = batch(world, [2, 13, 3, 12, 2, 13, 3, 12])
    [rank] = dealing(micro_batch_size=4, num_ranks=1).cut(examples)
    assert [sorted(m.rows.tolist()) for m in rank] == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_packed_rows_fill_the_bound_on_tokens(world):
    examples = batch(world, [10, 10, 3, 3, 7, 7])  # neighbours by length alone would need three
    [rank] = dealing(micro_batch_tokens=20, layout="packed", num_ranks=1).cut(examples)
    assert [int(examples.lengths[m.rows].sum()) for m in rank] == [20, 20]


def test_a_rank_without_rows_repeats_the_shortest_and_does_not_count_it(world):
    first, second = dealing(micro_batch_size=1, num_ranks=2).cut(batch(world, [4, 9, 2]))
    assert [(m.rows.tolist(), m.counted) for m in first] == [([1], True), ([2], False)]
    assert [(m.rows.tolist(), m.counted) for m in second] == [([0], True), ([2], True)]
    alone = dealing(num_ranks=2).cut(batch(world, [4]))[1]
    assert [(m.rows.tolist(), m.width, m.counted) for m in alone] == [([0], 4, False)]


def test_a_rank_with_units_to_spare_cuts_them_finer_instead_of_repeating(world):
    examples = batch(world, [12, 2, 2, 2, 2, 2])
    limits = {"micro_batch_tokens": 13, "layout": "packed"}
    ranks = dealing(**limits, num_ranks=2).cut(examples)
    assert all(microbatch.counted for rank in ranks for microbatch in rank)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_where_a_schedule_needs_more_microbatches_units_are_cut_finer_and_then_repeated(world, layout):
    limits = {"micro_batch_size": 8, "layout": layout, "fewest_microbatches": 3}
    [rank] = dealing(**limits, num_ranks=1).cut(batch(world, [4, 9, 2, 5]))
    assert [microbatch.counted for microbatch in rank] == [True] * 3
    assert sorted(row for microbatch in rank for row in microbatch.rows.tolist()) == [0, 1, 2, 3]
    for rank in dealing(**limits, num_ranks=2).cut(batch(world, [4, 9])):
        assert [microbatch.counted for microbatch in rank] == [True, False, False]


def test_the_cut_does_not_depend_on_what_rows_hold(world):
    examples = batch(world, [3, 9, 4, 9, 9, 2])
    other = dataclasses.replace(examples, tokens=examples.tokens + 1, weight=examples.weight * 2)
    first, second = (dealing(micro_batch_size=2, num_ranks=2).cut(each) for each in (examples, other))
    assert [[m.rows.tolist() for m in rank] for rank in first] == [[m.rows.tolist() for m in rank] for rank in second]


def test_an_empty_batch_is_refused(world):
    with pytest.raises(BatchError, match="the batch has no rows"):
        dealing(num_ranks=3).cut(batch(world, []))


@pytest.mark.parametrize("token", [-1, 50, 2**40])
def test_an_id_outside_the_vocabulary_is_named_with_its_row(world, token):
    examples = batch(world, [3, 9, 4])
    examples.tokens[1, 8] = token
    with pytest.raises(BatchError, match=f"row 1: token 8 has the id {token}, and the model's ids are from 0 to 49"):
        dealing(num_ranks=1, vocabulary_size=50).cut(examples)


def test_padding_may_hold_any_id_and_the_last_of_the_vocabulary_is_one(world):
    examples = batch(world, [3, 9, 4])
    examples.tokens[0, 3:] = -100
    examples.tokens[1, 8] = 49
    [[microbatch]] = dealing(num_ranks=1, vocabulary_size=50).cut(examples)
    assert sorted(microbatch.rows.tolist()) == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="lengths and trainable cannot lie on two devices without one")
def test_lengths_may_lie_on_another_device_than_the_rest(world):
    here = batch(world, [3, 9, 4])
    for moved in ({"lengths": here.lengths.cuda()}, {"trainable": here.trainable.cuda()}):
        there = dataclasses.replace(here, **moved)
        there.tokens[0, 3:] = -100
        [[microbatch]] = dealing(num_ranks=1, vocabulary_size=50).cut(there)
        assert sorted(microbatch.rows.tolist()) == [0, 1, 2]


def test_a_row_over_the_bound_on_tokens_is_named_with_the_setting(world):
    with pytest.raises(BatchError, match=r"row 1 has 9 tokens: 9 as the model reads them.*micro_batch_tokens=8; raise"):
        dealing(micro_batch_tokens=8, num_ranks=1).cut(batch(world, [4, 9, 2]))
    with pytest.raises(BatchError, match="row 1 has 9 tokens: 12 as the model reads them"):
        dealing(micro_batch_tokens=11, num_ranks=1, token_multiple=4).cut(batch(world, [4, 9, 2]))
    limits = {"micro_batch_tokens": 11, "layout": "packed"}
    with pytest.raises(BatchError, match="row 3 has 9 tokens, and the 2 rows that belong together: 13 as"):
        dealing(**limits, num_ranks=1).cut(batch(world, [1, 1, 4, 9], kind="Pairs"))


def test_a_unit_larger_than_a_microbatch_is_refused(world):
    with pytest.raises(BatchError, match="micro_batch_size must be at least 2"):
        dealing(micro_batch_size=1, num_ranks=1).cut(batch(world, [3, 4], kind="Pairs"))[0]


def test_half_a_unit_is_refused(world):
    with pytest.raises(BatchError, match="5 rows, of which 2 belong together each: B must be a multiple of 2"):
        dealing(num_ranks=1).cut(batch(world, [3] * 5, kind="Pairs"))


def test_a_first_token_cannot_be_trained_on(world):
    examples = batch(world, [3, 4, 5])
    examples.trainable[2, 0] = True
    with pytest.raises(BatchError, match="row 2: its first token is marked trainable"):
        dealing(num_ranks=1).cut(examples)


@pytest.mark.parametrize(("row", "column"), [(0, 3), (1, 12), (2, 11), (299, 7)])
def test_padding_cannot_be_trained_on(world, row, column):
    examples = batch(world, [3, 4, 11, *[7] * 297])
    examples.trainable[row, column] = True
    with pytest.raises(BatchError, match=f"row {row}: token {column} is marked trainable"):
        dealing(num_ranks=1).cut(examples)


@pytest.mark.parametrize("length", [0, 14])
def test_a_length_that_its_row_cannot_have_is_refused(world, length):
    examples = batch(world, [3, 4, 5])
    examples.lengths[1] = length
    examples.trainable[:] = False
    with pytest.raises(BatchError, match=f"row 1 has length {length}, where tokens hold 13"):
        dealing(num_ranks=1).cut(examples)


@pytest.mark.parametrize("field", ["micro_batch_size", "micro_batch_tokens"])
def test_limits_below_one_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be >= 1"):
        DTensorConfig(**{field: 0})


def test_a_field_is_cut_along_tokens_by_its_declaration_and_not_by_its_size(world):
    @dataclasses.dataclass(frozen=True)
    class WithFeatures(world.Examples):
        row_fields: ClassVar[tuple[str, ...]] = ("features",)
        features: torch.Tensor

    @dataclasses.dataclass(frozen=True)
    class Undeclared(world.Examples):
        features: torch.Tensor

    plain, limits = batch(world, [3, 9, 5]), {"micro_batch_size": 1}
    for size in (WIDTH, 16):
        features = torch.arange(3.0 * size).view(3, size)
        examples = WithFeatures(**vars(plain), features=features)
        for microbatch in dealing(**limits, num_ranks=1).cut(examples)[0]:
            rows = microbatch.of(examples, device="cpu")
            assert torch.equal(rows.features, features[microbatch.rows])
            assert rows.tokens.shape == (1, microbatch.width)
    undeclared = Undeclared(**vars(plain), features=torch.zeros(3, 16))
    with pytest.raises(BatchError, match=r"features is \[3, 16\], and tokens are \[3, 13\].*row_fields: ClassVar"):
        dealing(**limits, num_ranks=1).cut(undeclared)[0]
    with pytest.raises(BatchError, match=r"features is \[2\], and the batch has 3 rows"):
        dealing(**limits, num_ranks=1).cut(Undeclared(**vars(plain), features=torch.zeros(2)))[0]
