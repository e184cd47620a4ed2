"""Claims about attention in plain torch: each row as if alone, on one rank or cut over several; nothing left out."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_backends.errors import ModelError
from rl_backends.megatron.attention import TorchAttention

QUERY_HEADS, FEATURES = 4, 8
CONFIG = {
    "kv_channels": FEATURES,
    "attention_dropout": 0.0,
    "softmax_type": "vanilla",
    "window_size": None,
    "apply_query_key_layer_scaling": False,
    "qk_clip": False,
}
CAUSAL = SimpleNamespace(name="causal")
ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
PACKS = {"unequal": [5, 16, 1, 9, 9, 9, 2], "one row": [13], "equal": [6, 6, 6]}
WINDOWS = [None, 1, 4, 9, 100]


def attention(*, group=ONE_RANK, config=(), **given):
    settings = {"attn_mask_type": CAUSAL, "attention_type": "self", **given}
    groups = SimpleNamespace(cp=group)
    return TorchAttention(SimpleNamespace(**CONFIG | dict(config)), 3, pg_collection=groups, **settings)


def packed(lengths, **others):
    """As Megatron's PackedSeqParams, of which `lengths` are whole rows."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    nothing = {"cu_seqlens_q_padded": None, "cp_group": None, "local_cp_size": None}
    return SimpleNamespace(**{"qkv_format": "thd", "cu_seqlens_q": starts, **nothing, **others})


def heads(num_tokens, *, key_heads=2, dtype=torch.float32):
    """Queries, keys, values and the gradient of the answer, [tokens, heads, features]."""
    generator = torch.Generator().manual_seed(num_tokens)
    made = [
        torch.randn(num_tokens, number, FEATURES, generator=generator)
        for number in (QUERY_HEADS, key_heads, key_heads, QUERY_HEADS)
    ]
    return [tensor.to(dtype) for tensor in made]


def plain(tensors, lengths, *, window=None, scale=FEATURES**-0.5):
    """The answer and the gradients of queries, keys and values: row by row, every score written down, in float64."""
    query, key, value, gradient = (tensor.double() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = []
    for q, *shared in zip(*(leaf.split(lengths) for leaf in leaves), strict=True):
        k, v = (tensor.repeat_interleave(QUERY_HEADS // tensor.shape[1], dim=1) for tensor in shared)
        behind = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    answer = torch.cat(out)
    return [answer.detach(), *torch.autograd.grad(answer, leaves, gradient)]


def answers(module, tensors, lengths=None, *, rows=None):
    """The same of `module`, flattened to [tokens, heads, features]; `rows` of equal length are given as [S, b, …]."""
    *leaves, gradient = (tensor.clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if rows is None:
        out = module(*leaves, None, attn_mask_type=CAUSAL, attention_bias=None, packed_seq_params=packed(lengths))
    else:
        out = module(*(leaf.unflatten(0, (rows, -1)).transpose(0, 1) for leaf in leaves), None, attn_mask_type=CAUSAL)
        assert out.shape == (len(gradient) // rows, rows, QUERY_HEADS * FEATURES)
        out = out.transpose(0, 1).flatten(0, 1).unflatten(-1, (QUERY_HEADS, FEATURES))
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def difference(found, expected):
    """The largest, in units of the largest number expected."""
    pairs = zip(found, expected, strict=True)
    return max(float((own - exact).abs().max()) for own, exact in pairs) / max(float(e.abs().max()) for e in expected)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", PACKS)
def test_packed_rows_equal_rows_alone_in_values_and_gradients(name, window):
    lengths = PACKS[name]
    tensors = heads(sum(lengths))
    found = answers(attention(sliding_window=window), tensors, lengths)
    assert difference(found, plain(tensors, lengths, window=window)) <= 1e-6


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_padded_rows_equal_rows_alone_in_values_and_gradients(key_heads, window):
    tensors = heads(3 * 10, key_heads=key_heads)
    found = answers(attention(sliding_window=window), tensors, rows=3)
    assert difference(found, plain(tensors, [10] * 3, window=window)) <= 1e-6


def test_scores_are_scaled_as_asked():
    tensors = heads(7)
    found = answers(attention(softmax_scale=0.9), tensors, [7])
    assert difference(found, plain(tensors, [7], scale=0.9)) <= 1e-6
    assert difference(found, plain(tensors, [7])) > 1e-2


def test_a_row_is_the_same_bit_for_bit_whatever_its_neighbours_hold():
    lengths = PACKS["unequal"]
    tensors = heads(sum(lengths))
    before = answers(attention(), tensors, lengths)
    for tensor in tensors:
        tensor[: lengths[0]] += 1
    after = answers(attention(), tensors, lengths)
    assert all(torch.equal(a[lengths[0] :], b[lengths[0] :]) for a, b in zip(before, after, strict=True))
    assert not torch.equal(before[0][: lengths[0]], after[0][: lengths[0]])


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that was made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max(
            [self.nbytes, *(t.untyped_storage().nbytes() for t in tree_leaves(out) if torch.is_tensor(t))]
        )
        return out


@pytest.mark.parametrize("window", [None, 3])
def test_no_tensor_outgrows_the_pack_or_the_mask_of_one_row(window):
    lengths = [64, 32] * 32  # 3072² scores of 4 heads would take 150 MB
    tensors = heads(sum(lengths))
    with LargestTensor() as seen:
        answers(attention(sliding_window=window), tensors, lengths)
    scores = 3072 * QUERY_HEADS * 64 * 4  # of each token with the longest row, where all of a row are made at once
    assert seen.nbytes <= (tensors[0].nbytes if window else scores)


def test_bfloat16_differs_from_float32_by_its_rounding():
    lengths = PACKS["unequal"]
    tensors = heads(sum(lengths), dtype=torch.bfloat16)
    found = answers(attention(sliding_window=4), tensors, lengths)
    assert found[0].dtype == torch.bfloat16
    assert difference(found, plain(tensors, lengths, window=4)) <= 0.05


# -- Cut over context-parallel ranks --------------------------------------------------------------


def own_tokens(lengths, *, rank, ranks):
    """Of whole rows one after the other, those that lie on this rank, in its order."""
    found, start = [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        found += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        start += length
    return torch.cat(found)


def answers_of_rank(rank, *, ranks, cases):
    import torch.distributed as dist

    found = []
    for lengths, rows, window, dtype in cases:
        own = own_tokens(lengths, rank=rank, ranks=ranks)
        tensors = [tensor[own] for tensor in heads(sum(lengths), dtype=dtype)]
        module = attention(group=dist.group.WORLD, sliding_window=window)
        found.append(answers(module, tensors, lengths, rows=rows))
    return found


def worst_of_ranks(on_ranks, cases, *, ranks):
    """The largest difference from plain attention of whole rows, of each case."""
    of_ranks = on_ranks(lambda rank: answers_of_rank(rank, ranks=ranks, cases=cases), ranks=ranks)
    worst = []
    for (lengths, _, window, dtype), *found in zip(cases, *of_ranks, strict=True):
        order = torch.cat([own_tokens(lengths, rank=rank, ranks=ranks) for rank in range(ranks)]).argsort()
        whole = [torch.cat(parts)[order] for parts in zip(*found, strict=True)]
        worst.append(difference(whole, plain(heads(sum(lengths), dtype=dtype), lengths, window=window)))
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_parts_of_rows_answer_as_one_with_whole_rows(on_ranks, ranks):
    grain = 2 * ranks
    packs = [[grain * length for length in pack] for pack in ([5, 1, 3, 3, 2], [4], [2, 2, 2])]
    cases = [(pack, None, window, torch.float32) for pack in packs for window in (None, 1, 3, 7, 16)]
    cases += [([5 * grain] * 3, 3, window, torch.float32) for window in (None, 4, 13)]
    for case, worst in zip(cases, worst_of_ranks(on_ranks, cases, ranks=ranks), strict=True):
        assert worst <= 1e-6, case


def test_ranks_answer_in_bfloat16_within_its_rounding(on_ranks):
    (worst,) = worst_of_ranks(on_ranks, [([12, 4, 20], None, 5, torch.bfloat16)], ranks=2)
    assert worst <= 0.05


# -- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "config", "named"),
    [
        ({"attention_dropout": 0.1}, {}, "attention_dropout=0.1"),
        ({}, {"attention_dropout": 0.2}, "attention_dropout=0.2"),
        ({}, {"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({}, {"window_size": (3, 0)}, r"window_size=\(3, 0\) \(give sliding_window\)"),
        ({}, {"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
        ({}, {"qk_clip": True}, "qk_clip"),
        ({"attention_type": "cross"}, {}, "attention_type='cross'"),
        ({"attn_mask_type": SimpleNamespace(name="no_mask")}, {}, "attn_mask_type=no_mask"),
    ],
)
def test_what_a_configuration_asks_for_and_would_be_left_out_is_refused(given, config, named):
    with pytest.raises(ModelError, match=f"layer 3 asks for {named}, which attention in plain torch leaves out"):
        attention(config=config, **given)


def test_a_window_in_which_a_token_does_not_see_itself_is_refused():
    with pytest.raises(ModelError, match="sliding_window=0 must be >= 1"):
        attention(sliding_window=0)


@pytest.mark.parametrize(
    ("called", "named"),
    [
        ({"attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}, "attention_mask"),
        ({"attention_bias": torch.ones(6, 6)}, "attention_bias"),
        ({"attn_mask_type": SimpleNamespace(name="arbitrary")}, "attn_mask_type=arbitrary"),
        ({"packed_seq_params": packed([6], cp_group=ONE_RANK)}, "packed_seq_params.cp_group"),
        ({"packed_seq_params": packed([6], local_cp_size=1)}, "packed_seq_params.local_cp_size"),
        ({"packed_seq_params": packed([6], qkv_format="sbhd")}, "a qkv_format other than 'thd'"),
    ],
)
def test_what_a_call_asks_for_and_would_be_left_out_is_refused(called, named):
    query, key, value, _ = heads(6)
    with pytest.raises(ModelError, match=f"layer 3 asks for {named}, which attention in plain torch leaves out"):
        attention()(query, key, value, **{"attention_mask": None, **called})


def test_rows_that_are_not_the_tokens_given_are_refused():
    query, key, value, _ = heads(6)
    with pytest.raises(ModelError, match="packed rows have 7 tokens, and 1 context-parallel ranks hold 6 each"):
        attention()(query, key, value, None, packed_seq_params=packed([4, 3]))


def test_rows_that_ranks_cannot_share_are_refused():
    two = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ModelError, match=r"packed rows have \[4, 6\] tokens over 2 context-parallel ranks: pad each"):
        attention(group=two)._held(packed([4, 6]), num_tokens=5)


def test_megatron_builds_and_calls_it_as_its_own(imported):
    from megatron.core.transformer.attention import CoreAttention, CoreAttentionBuilder

    def names(function):
        return [name for name in inspect.signature(function).parameters if name != "self"]

    inspect.signature(TorchAttention).bind(**dict.fromkeys(names(CoreAttentionBuilder.__call__)))
    inspect.signature(TorchAttention.forward).bind(None, **dict.fromkeys(names(CoreAttention.forward)))
