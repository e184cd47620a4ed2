"""Claims about packing: every row once, no bin too full, and tensors that keep documents apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.data import DataError, lay_out, pack

LENGTHS = st.lists(st.integers(1, 12), max_size=40)


@given(LENGTHS, st.integers(12, 30))
def test_every_row_is_in_one_bin_and_no_bin_is_too_full(lengths, capacity):
    bins = pack(lengths, capacity=capacity)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in indices) <= capacity for indices in bins)
    assert bins == sorted(sorted(indices) for indices in bins)


@given(LENGTHS, st.integers(12, 30))
def test_the_bins_are_those_of_best_fit_decreasing_by_the_book(lengths, capacity):
    bins = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        filled = [sum(lengths[other] for other in indices) for indices in bins]
        fits = [number for number in range(len(bins)) if filled[number] + lengths[index] <= capacity]
        if fits:
            bins[max(fits, key=lambda number: filled[number])].append(index)
        else:
            bins.append([index])
    assert pack(lengths, capacity=capacity) == sorted(sorted(indices) for indices in bins)


def test_a_row_that_fits_no_bin_is_refused_by_name():
    with pytest.raises(DataError, match="row 1: has 9 tokens, and a bin holds capacity=8"):
        pack([3, 9], capacity=8)
    with pytest.raises(DataError, match=r"a\.jsonl:7: has no tokens"):
        pack([3, 0], capacity=8, names=["a.jsonl:6", "a.jsonl:7"])


@given(st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=1, max_size=9), max_size=12))
def test_the_tensors_hold_every_row_and_train_no_first_token(documents):
    rows = [[token for token, _ in document] for document in documents]
    trainable = [[trained for _, trained in document] for document in documents]
    packed = lay_out(rows, trainable, bins=pack([len(row) for row in rows], capacity=12))
    assert int((packed.document_ids >= 0).sum()) == sum(map(len, rows))
    for index, (row, mask) in enumerate(zip(rows, trainable, strict=True)):
        place = packed.document_ids == index
        assert packed.tokens[place].tolist() == row
        assert packed.position_ids[place].tolist() == list(range(len(row)))
        assert packed.trainable[place].tolist() == [False, *mask[1:]]
    padding = packed.document_ids < 0
    assert not packed.tokens[padding].any()
    assert not packed.trainable[padding].any()
    starts = packed.position_ids == 0
    changes = torch.ones_like(starts)
    changes[:, 1:] = packed.document_ids[:, 1:] != packed.document_ids[:, :-1]
    assert torch.equal(starts, changes)  # positions begin anew exactly where another document, or the padding, does


def test_the_width_may_be_fixed():
    packed = lay_out([[5, 6], [7]], [[True, True], [True]], bins=[[0, 1]], width=5)
    assert packed.tokens.tolist() == [[5, 6, 7, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 0, 1]]
    assert packed.document_ids.tolist() == [[0, 0, 1, -1, -1]]
    assert packed.trainable.tolist() == [[False, True, False, False, False]]
    with pytest.raises(DataError, match=r"bin 0 \(rows \[0, 1\]\) has 3 tokens, and width=2"):
        lay_out([[5, 6], [7]], [[True, True], [True]], bins=[[0, 1]], width=2)
    with pytest.raises(DataError, match="row 0 has 2 tokens, and its trainable 1"):
        lay_out([[5, 6]], [[True]], bins=[[0]])
