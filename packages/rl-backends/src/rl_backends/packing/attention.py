"""Causal attention over packed rows, row by row: no score between two rows is ever computed.

What transformers' AttentionInterface calls in the place of "sdpa". Rows lie one after the other in one sequence, and
`cu_seq_lens_q` tells where each begins. Sliding windows, soft-capped scores (Gemma 2) and attention sinks (GPT-OSS) are
those of transformers' own eager attention.

    on CUDA in bfloat16 or float16    torch's varlen_attn, one kernel for all rows
    elsewhere                         scaled_dot_product_attention, once for neighbours of equal length
    scores capped, or with sinks      the same, in plain operations: [rows, heads, L, L] of neighbours of equal length

Shapes are in words: this runs inside compiled layers, where nothing can check them.

Axes: S tokens of the pack, Q query heads, K key heads, D features of a head; L tokens of each of n rows.
"""

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backends.errors import ModelError

__all__ = ["packed_attention"]

_LARGEST_HEAD_OF_KERNEL = 256
_CHANGES_SCORES = ("position_bias", "cache", "block_table", "head_mask", "indexer")
"""What some attentions hand on to change scores, and this function would leave out."""


def packed_attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    places_of_rows: Tensor | None = None,
    places_of_pack: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Each token's attention to those of its row up to itself, as transformers' attention functions return it.

    Args:
        module: the attention that calls.
        query: [1, Q, S, D]; `key` and `value` are [1, K, S, D] and [1, K, S, E], where K divides Q.
        key: of the same tokens.
        value: of the same tokens.
        attention_mask: None; rows need no mask.
        scaling: of scores; D to the power of -1/2 where it is None.
        dropout: 0; packing is for exact results.
        sliding_window: tokens that a query sees, itself among them; None for all of its row.
        softcap: the bound on scores, by tanh.
        s_aux: [Q], a score that takes part in each softmax and has no value.
        cu_seq_lens_q: int32 [rows + 1], where each row begins, and the end of the last.
        max_length_q: tokens of the longest row.
        is_causal: overrules the module's own attribute; False is refused.
        places_of_rows: int64 [N], where rows share what they begin with: the place in the pack of each token of each
            row. `cu_seq_lens_q` and `max_length_q` are then of these.
        places_of_pack: int64 [S], the reverse: one of the rows' tokens that is read in each place of the pack.
        **others: what transformers hands to all its attentions.

    Returns [1, S, Q, E], and None for weights.

    Raises:
        ModelError: the call does not say where rows begin, or asks for what would be left out.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            f"{type(module).__name__} was called without cu_seq_lens_q and max_length_q, while sequence packing is on: "
            f"rows would see one another; give both to the base model, or load a model without sequence_packing"
        )
    _refuse_what_is_left_out(module, attention_mask, dropout=dropout, is_causal=is_causal, others=others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = _at(places_of_rows, (query, key, value))
    if softcap is None and s_aux is None and _has_kernel(query, value):
        out = _in_one_kernel(tensors, cu_seq_lens_q, longest=max_length_q, scale=scale, window=sliding_window)
    else:
        out = _row_by_row(tensors, cu_seq_lens_q, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return (out if places_of_pack is None else out.index_select(0, places_of_pack))[None], None


def _at(places: Tensor | None, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of each token of each row, where rows share some."""
    if places is None:
        return tensors
    query, key, value = (tensor.index_select(2, places) for tensor in tensors)
    return query, key, value


def _refuse_what_is_left_out(
    module: nn.Module, mask: Tensor | None, *, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    given += [] if mask is None else ["attention_mask"]
    given += [] if causal else ["is_causal=False"]
    given += ["dropout"] if dropout else []
    if given:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(given)}, which packed attention does not do")


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _LARGEST_HEAD_OF_KERNEL
        and query.shape[-1] % 8 == 0
    )


def _in_one_kernel(
    tensors: tuple[Tensor, Tensor, Tensor], starts: Tensor, *, longest: int, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    out = varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _row_by_row(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    # Neighbours of equal length, as a sorted microbatch has many: (L, n)
    runs = [(length, len(list(run))) for length, run in groupby(starts.diff().tolist())]
    # One split, whose backward is one concatenation; a slice for each row would add up as many gradients of the pack.
    parts = [torch.split(tensor[0], [length * rows for length, rows in runs], dim=1) for tensor in tensors]
    out = []
    for (length, rows), *run in zip(runs, *parts, strict=True):
        query, key, value = (tensor.view(-1, rows, length, tensor.shape[-1]).transpose(0, 1) for tensor in run)
        mask = None if window is None or length <= window else _band(length, window, query.device)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        else:
            attended = _plainly((query, key, value), mask, scale=scale, softcap=softcap, sinks=sinks)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys a query sees, [L, L]: itself and the window - 1 before it."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device)
    return seen.tril_().triu_(1 - window)


def _plainly(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, Q, L, E]. Scores are scaled, then capped, then masked; a sink is one more score, without a value."""
    query, key, value = tensors
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = _band(length, length, scores.device) if mask is None else mask
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(len(scores), -1, length, 1)], dim=-1)
    return scores.softmax(-1)[..., :length].to(value.dtype) @ value
