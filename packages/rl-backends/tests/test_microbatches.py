"""Claims about the cut of a batch over ranks and microbatches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_backends.dtensor.microbatches import cut


@given(
    lengths=st.lists(st.integers(2, 13), min_size=1, max_size=24),
    micro_batch_size=st.integers(2, 9),
    num_ranks=st.integers(1, 4),
    kind=st.sampled_from(["Examples", "Pairs"]),
)
def test_each_row_is_taken_once_and_units_stay_together(world, lengths, micro_batch_size, num_ranks, kind):
    kind = getattr(world, kind)
    unit = kind.rows_per_unit
    lengths = torch.tensor(lengths).repeat_interleave(unit)
    examples = kind(
        tokens=torch.zeros(len(lengths), 13),
        lengths=lengths,
        trainable=torch.zeros(len(lengths), 13).bool(),
        weight=lengths,
    )
    ranks = [
        list(cut(examples, micro_batch_size=micro_batch_size, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert len({len(microbatches) for microbatches in ranks}) == 1  # all enter the collectives equally often
    taken = [row for rank in ranks for microbatch in rank if microbatch.counted for row in microbatch.rows.tolist()]
    assert sorted(taken) == list(range(len(lengths)))
    for microbatch in (microbatch for rank in ranks for microbatch in rank):
        rows = microbatch.rows.tolist()
        assert 0 < len(rows) <= micro_batch_size
        assert microbatch.width == lengths[microbatch.rows].max()
        assert all(
            rows[start : start + unit] == list(range(rows[start], rows[start] + unit))
            for start in range(0, len(rows), unit)
        )
        assert all(rows[start] % unit == 0 for start in range(0, len(rows), unit))


def test_a_unit_larger_than_a_microbatch_is_refused(world):
    with pytest.raises(ValueError, match="micro_batch_size at least 2"):
        list(cut(world.make_examples(kind=world.Pairs), micro_batch_size=1, rank=0, num_ranks=1))


def test_half_a_unit_is_refused(world):
    with pytest.raises(ValueError, match="5 rows, of which 2 belong together"):
        list(cut(world.make_examples(rows=5, kind=world.Pairs), micro_batch_size=4, rank=0, num_ranks=1))


def test_a_first_token_cannot_be_trained_on(world):
    examples = world.make_examples()
    examples.trainable[3, 0] = True
    with pytest.raises(ValueError, match="row 3: its first token is marked trainable"):
        list(cut(examples, micro_batch_size=4, rank=0, num_ranks=1))
