"""Claims about what ranks read: every token once, each asked one from its own place, as Megatron counts positions."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends.batching.microbatches import SequenceShard, make_inputs
from rl_parallel_plans.context_parallel.layout import own_chunks

WIDTH = 11
SETTINGS = settings(max_examples=80, deadline=None)


@st.composite
def questions(draw, layouts=("padded", "packed")):
    """Rows whose tokens are all different and none of them 0; what is asked of them, and how they are cut."""
    lengths = torch.tensor(draw(st.lists(st.integers(1, WIDTH), min_size=1, max_size=6)))
    width = int(lengths.max()) + draw(st.integers(0, 2))
    tokens = torch.arange(1, len(lengths) * width + 1).view(len(lengths), width)
    offset = draw(st.sampled_from([0, 1]))
    seed = draw(st.integers(0, 2**16))
    asked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < draw(st.sampled_from([0.5, 1.0]))
    columns = torch.arange(width)
    asked &= (columns >= offset) & (columns < lengths[:, None])
    ranks = draw(st.none() | st.integers(1, 4))
    return SimpleNamespace(
        tokens=tokens,
        lengths=lengths,
        asked=asked,
        offset=offset,
        layout=draw(st.sampled_from(layouts)),
        multiple=draw(st.sampled_from([1, 2, 3, 4, 8])),
        shards=[None] if ranks is None else [SequenceShard(rank, ranks) for rank in range(ranks)],
    )


def inputs_of_ranks(question):
    return [
        make_inputs(
            question.tokens,
            question.lengths,
            question.asked,
            layout=question.layout,
            offset=question.offset,
            shard=shard,
            multiple=question.multiple,
        )
        for shard in question.shards
    ]


def positions_read(inputs):
    """Of each token that a rank reads, flattened."""
    places = torch.arange(inputs.tokens.shape[1])[None] if inputs.position_ids is None else inputs.position_ids
    return places.expand(inputs.tokens.shape).flatten()


@SETTINGS
@given(question=questions())
def test_each_asked_token_is_predicted_once_from_its_own_place(question):
    width = question.tokens.shape[1]
    found = []
    for inputs in inputs_of_ranks(question):
        rows, columns = inputs.into // width, inputs.into % width
        assert torch.equal(inputs.targets, question.tokens[rows, columns])
        assert torch.equal(inputs.tokens.flatten()[inputs.at], question.tokens[rows, columns - question.offset])
        assert torch.equal(positions_read(inputs)[inputs.at], columns - question.offset)
        found.append(inputs.into)
    assert torch.equal(torch.cat(found).sort().values, question.asked.flatten().nonzero()[:, 0])


@SETTINGS
@given(question=questions())
def test_ranks_together_read_the_tokens_of_the_rows_and_padding_alone(question):
    read = torch.cat([inputs.tokens.flatten() for inputs in inputs_of_ranks(question)])
    real = torch.arange(question.tokens.shape[1]) < question.lengths[:, None]
    assert torch.equal(read[read != 0].sort().values, question.tokens[real])


@SETTINGS
@given(question=questions())
def test_all_ranks_read_equally_many_tokens_a_multiple_of_what_was_asked_and_few_more_than_there_are(question):
    ranks = len(question.shards)
    chunks = 1 if question.shards == [None] else 2
    sizes = {inputs.tokens.shape for inputs in inputs_of_ranks(question)}
    ((rows, size),) = sizes
    assert size % question.multiple == 0
    grain = chunks * question.multiple  # at least the least common multiple
    if question.layout == "padded":
        assert rows == len(question.lengths)
        assert size * ranks < question.tokens.shape[1] + grain * ranks
    else:
        assert rows == 1
        padded = -(-question.lengths // (chunks * ranks)) * chunks
        assert 0 <= size - padded.sum() < grain


@SETTINGS
@given(question=questions(layouts=("packed",)))
def test_rows_begin_at_the_ranks_share_of_where_whole_rows_begin(question):
    ranks, grain = len(question.shards), 1 if question.shards == [None] else 2 * len(question.shards)
    number = len(question.lengths)
    for inputs in inputs_of_ranks(question):
        starts = inputs.cu_seq_lens
        assert starts.dtype == torch.int32
        padded = starts.diff()
        assert torch.equal(padded[:number], (-(-question.lengths // grain) * grain).int())
        assert int(starts[-1]) == inputs.tokens.shape[1] * ranks
        assert len(padded) in (number, number + 1)
        assert bool((padded > 0).all())
        assert bool((padded % grain == 0).all())
        assert inputs.longest == int(padded.max())
        shares = inputs.tokens[0].split((padded // ranks).tolist())
        for row, share in enumerate(shares):
            own = share[share != 0]
            expected = question.tokens[row] if row < number else own.new_empty(0)
            assert bool(torch.isin(own, expected).all())


@SETTINGS
@given(question=questions(layouts=("padded",)))
def test_padded_rows_are_cut_as_the_sequences_of_rl_parallel_plans(question):
    for shard, inputs in zip(question.shards, inputs_of_ranks(question), strict=True):
        if shard is None:
            assert inputs.position_ids is None
            continue
        mesh = SimpleNamespace(size=lambda shard=shard: shard.num_ranks, get_local_rank=lambda shard=shard: shard.rank)
        half = inputs.tokens.shape[1] // 2
        expected = torch.cat([torch.arange(half) + chunk * half for chunk in own_chunks(mesh)])[None]
        assert torch.equal(inputs.position_ids, expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_megatron_turns_packed_rows_by_the_same_positions(imported, ranks):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    torch.manual_seed(0)
    lengths = torch.tensor([5, 11, 1, 8])
    tokens = torch.randint(1, 60, (4, WIDTH))
    asked = torch.zeros(4, WIDTH, dtype=torch.bool)
    for rank in range(ranks):
        shard = SequenceShard(rank, ranks) if ranks > 1 else None
        inputs = make_inputs(tokens, lengths, asked, layout="packed", shard=shard, multiple=8)
        angles = torch.arange(inputs.longest)[:, None, None, None] * torch.tensor([1.0, 0.1]).repeat(2)
        heads = torch.randn(inputs.tokens.shape[1], 1, 4)
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        turned = _apply_rotary_pos_emb_thd(heads, inputs.cu_seq_lens, angles, cp_group=group)
        own = angles[inputs.position_ids[0], 0]
        halves = torch.cat([-heads[..., 2:], heads[..., :2]], dim=-1)
        assert torch.equal(turned, heads * own.cos() + halves * own.sin())


def test_a_pack_that_needs_padding_ends_with_a_row_of_it():
    tokens = torch.tensor([[3, 4, 5], [6, 0, 0]])
    asked = torch.tensor([[False, True, True], [False, False, False]])
    given_ = {"layout": "packed", "multiple": 4}
    inputs = make_inputs(tokens, torch.tensor([3, 1]), asked, **given_)
    assert inputs.cu_seq_lens.tolist() == [0, 3, 4]  # a multiple already
    inputs = make_inputs(tokens[:1], torch.tensor([3]), asked[:1], **given_)
    assert inputs.tokens.tolist() == [[3, 4, 5, 0]]
    assert inputs.cu_seq_lens.tolist() == [0, 3, 4]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0]]
    ranks = [
        make_inputs(tokens, torch.tensor([3, 1]), asked, shard=SequenceShard(rank, 2), **given_) for rank in (0, 1)
    ]
    assert [inputs.tokens.tolist() for inputs in ranks] == [[[3, 0, 6, 0]], [[4, 5, 0, 0]]]
    assert [inputs.position_ids.tolist() for inputs in ranks] == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]
    assert ranks[0].cu_seq_lens.tolist() == [0, 4, 8]
    assert [inputs.at.tolist() for inputs in ranks] == [[0], [0]]
    assert [inputs.into.tolist() for inputs in ranks] == [[1], [2]]
