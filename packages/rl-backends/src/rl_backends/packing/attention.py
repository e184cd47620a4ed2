"""Causal attention over packed or padded rows, by the kernel of choice: no score between two rows is ever computed.

What transformers' AttentionInterface calls in the place of "sdpa". Packed rows lie one after the other in one sequence,
and `cu_seq_lens_q` tells where each begins. Sliding windows, soft-capped scores (Gemma 2) and attention sinks (GPT-OSS)
are those of transformers' own eager attention. The kernels:

    sdpa      scaled_dot_product_attention, once for neighbours of equal length, in any dtype on any device; capped
              scores and sinks, which it does not know, in blocks of queries (`_Blockwise`); packed rows on a CPU, by
              `attention_on_cpu`
    flex      flex_attention, one kernel for all rows: caps, sinks, windows, heads of any size; CUDA
    varlen    torch's varlen_attn, one kernel for all rows: windows; CUDA, bfloat16 or float16, heads up to 256
    flash     flash_attn_varlen_func of the package flash-attn: windows and caps; CUDA, bfloat16 or float16

All of them need memory that grows with the tokens, not with their square. Shapes are in words: this runs inside
compiled layers, where nothing can check them.

Axes: S tokens of the pack, B padded rows, Q query heads, K key heads, D features of a head, E of a value; L tokens of
each of n rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from rl_backends.errors import ModelError

AttentionKernel = Literal["sdpa", "flex", "varlen", "flash"]

LARGEST_HEAD = 256
"""Of varlen_attn and flash-attn."""
BLOCK_BYTES = 4 * 2**20
"""Most scores in fp32 that `_Blockwise` has at one time, unless 16 queries have more."""
SMALLEST_BLOCK = 16
_CHANGES_SCORES = ("position_bias", "cache", "block_table", "head_mask", "indexer")
"""What some attentions hand on to change scores, and these functions would leave out."""


def packed_attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: AttentionKernel = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    row_lengths: tuple[int, ...] | None = None,
    block_masks: Mapping[int, Any] | None = None,
    places_of_rows: Tensor | None = None,
    places_of_pack: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Each token's attention to those of its row up to itself, as transformers' attention functions return it.

    Args:
        module: the attention that calls.
        query: [1, Q, S, D]; `key` is [1, K, S, D] and `value` [1, K, S, E], where K divides Q.
        key: of the same tokens.
        value: of the same tokens.
        attention_mask: None; rows need no mask.
        kernel: what computes it; see the top of this file.
        scaling: of scores; D to the power of -1/2 where it is None.
        dropout: 0; packing is for exact results.
        sliding_window: tokens that a query sees, itself among them; None for all of its row.
        softcap: the bound on scores, by tanh.
        s_aux: [Q], a score that takes part in each softmax and has no value.
        cu_seq_lens_q: int32 [rows + 1], where each row begins, and the end of the last.
        max_length_q: tokens of the longest row.
        is_causal: overrules the module's own attribute; False is refused.
        row_lengths: tokens of each row, as numbers of the host. "sdpa" needs them, and without them waits for the
            device to read `cu_seq_lens_q`.
        block_masks: of "flex", by window; see `block_masks`. Without them the mask is made at every call.
        places_of_rows: int64 [N], where rows share what they begin with: the place in the pack of each token of each
            row. `cu_seq_lens_q`, `max_length_q`, `row_lengths` and `block_masks` are then of these.
        places_of_pack: int64 [S], the reverse: one of the rows' tokens that is read in each place of the pack.
        **others: what transformers hands to all its attentions.

    Returns [1, S, Q, E], and None for weights.

    Raises:
        ModelError: the call does not say where rows begin, or asks for what the kernel would leave out.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise ModelError(
            f"{type(module).__name__} was called without cu_seq_lens_q and max_length_q, while sequence packing is on: "
            f"rows would see one another; give both to the base model, or load a model without sequence_packing"
        )
    _refuse_what_is_left_out(module, attention_mask, dropout=dropout, is_causal=is_causal, others=others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = (query, key, value)
    if places_of_rows is not None:
        tensors = (
            query.index_select(2, places_of_rows),
            key.index_select(2, places_of_rows),
            value.index_select(2, places_of_rows),
        )
    if kernel == "sdpa":
        out = _row_by_row(
            tensors, cu_seq_lens_q, row_lengths, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
        )
    elif kernel == "flex":
        window = sliding_window or 0
        mask = None if block_masks is None else block_masks.get(window)
        if mask is None:
            mask = block_mask(cu_seq_lens_q, num_tokens=tensors[0].shape[2], window=window)
        out = _by_flex(tensors, mask, scale=scale, softcap=softcap, sinks=s_aux)[0].transpose(0, 1)
    else:
        if s_aux is not None or (softcap is not None and kernel == "varlen"):
            raise ModelError(
                f"{type(module).__name__} has attention sinks or capped scores, which kernels.attention={kernel!r} "
                f"does not compute; choose 'flex' or 'sdpa'"
            )
        seen = (-1 if sliding_window is None else sliding_window - 1, 0)
        out = _by_flash(kernel, tensors, cu_seq_lens_q, max_length_q, scale=scale, window=seen, softcap=softcap)
    return (out if places_of_pack is None else out.index_select(0, places_of_pack))[None], None


def padded_attention(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernel: AttentionKernel = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The same of right-padded rows of one length: query [B, Q, L, D], key [B, K, L, D], value [B, K, L, E].

    No mask keeps padding out: it comes after every token that counts, and attention is causal. `kernel` is "sdpa" or
    "flex". Returns [B, L, Q, E], and None for weights.

    Raises:
        ModelError: the call asks for what the kernel would leave out.
    """
    _refuse_what_is_left_out(module, attention_mask, dropout=dropout, is_causal=is_causal, others=others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tensors = (query, key, value)
    if kernel == "flex":
        starts = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
        mask = block_mask(starts, num_tokens=query.shape[2], window=sliding_window or 0)
        out = _by_flex(tensors, mask, scale=scale, softcap=softcap, sinks=s_aux)
    else:
        out = _equal_rows(tensors, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out.transpose(1, 2), None


def _refuse_what_is_left_out(
    module: nn.Module, mask: Tensor | None, *, dropout: float, is_causal: bool | None, others: Mapping[str, Any]
) -> None:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    given = [name for name in _CHANGES_SCORES if others.get(name) is not None]
    given += [] if mask is None else ["attention_mask"]
    given += [] if causal else ["is_causal=False"]
    given += ["dropout"] if dropout else []
    if given:
        raise ModelError(f"{type(module).__name__} asks for {', '.join(given)}, which packed attention does not do")


# -- sdpa: row by row ----------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each pack would be compiled anew: other lengths
def _row_by_row(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    lengths: Sequence[int] | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[S, Q, E]."""
    if window is None and softcap is None and sinks is None and is_flash_of_cpu(*tensors, scale=scale):
        query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
        return attention_on_cpu(query, key, value, rows=RowsOnCpu.packed(starts), scale=scale)
    # Neighbours of equal length, as a sorted microbatch has many: (L, n)
    runs = [(length, len(list(run))) for length, run in groupby(lengths or starts.diff().tolist())]
    # One split, whose backward is one concatenation; a slice for each row would add up as many gradients of the pack.
    parts = [torch.split(tensor[0], [length * rows for length, rows in runs], dim=1) for tensor in tensors]
    out = []
    for (length, rows), *run in zip(runs, *parts, strict=True):
        query, key, value = (tensor.view(-1, rows, length, tensor.shape[-1]).transpose(0, 1) for tensor in run)
        attended = _equal_rows((query, key, value), scale=scale, window=window, softcap=softcap, sinks=sinks)
        out.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def _equal_rows(
    tensors: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, Q, L, E] of query [n, Q, L, D], key [n, K, L, D] and value [n, K, L, E]."""
    query, key, value = tensors
    length = query.shape[2]
    windowed = window is not None and window < length
    if softcap is None and sinks is None and not (windowed and length * length > BLOCK_BYTES):
        mask = None
        if windowed:  # which keys a query sees, [L, L]: itself and the window - 1 before it
            assert window is not None
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_().triu_(1 - window)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    attended: Tensor = _Blockwise.apply(query, key, value, sinks, scale, window, softcap)  # type: ignore[no-untyped-call]
    return attended


def is_flash_of_cpu(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> bool:
    """Whether scaled_dot_product_attention would run its flash kernel for CPUs on [1, heads, tokens, D] each."""
    if query.device.type != "cpu":
        return False
    gqa = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)  # noqa: SLF001
    return chosen == SDPBackend.FLASH_ATTENTION.value


LONGEST_MULTIPLIED = 128
"""Tokens of a row, all scores of which `attention_on_cpu` makes by a multiplication and keeps for backward."""
_SCORES_AT_A_TIME = 2**17
"""Which a core's cache holds; or those of one row."""
_GRAIN = 16


class RowsOnCpu:
    """Rows padded to multiples of 16 tokens, which CPUs compute faster, those of one length together, heads first.

    Padding comes after all of a row, so that no token sees it; it repeats the row's first token.
    """

    def __init__(self, row: Tensor, place: Tensor, lengths: Tensor) -> None:
        """Of each token the number of its row and its place there, int64 [S]; tokens of each row, int64 [n]."""
        padded = -(-lengths // _GRAIN) * _GRAIN
        order = padded.argsort(stable=True)
        begin = torch.empty_like(padded).scatter_(0, order, padded[order].cumsum(0) - padded[order])
        sizes, counts = torch.unique_consecutive(padded[order], return_counts=True)
        self._groups: list[tuple[int, int]] = list(zip(counts.tolist(), sizes.tolist(), strict=True))
        self._of_token = begin[row], place, padded[row]
        self._of_row = (place == 0).nonzero()[order, 0], padded[order]
        self._of_heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    @classmethod
    def packed(cls, starts: Tensor) -> "RowsOnCpu":
        """Of rows one after the other, which begin at `starts`; kept with that tensor, which all layers are given."""
        kept: RowsOnCpu | None = getattr(starts, "rows_on_cpu", None)
        if kept is None:
            lengths = starts.diff().long()
            row = torch.repeat_interleave(lengths)
            kept = cls(row, torch.arange(len(row)) - starts[row], lengths)
            starts.rows_on_cpu = kept  # type: ignore[attr-defined]
        return kept

    @classmethod
    def side_by_side(cls, rows: int, length: int) -> "RowsOnCpu":
        """Of rows of one length, the first token of each before the second of any."""
        token = torch.arange(rows * length)
        return cls(token % rows, token // rows, torch.full((rows,), length))

    def places(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of [S, heads], flattened: where each is with padding; which is in each place with padding; 0 for padding."""
        if heads not in self._of_heads:
            (begin, place, padded), (first, sizes) = self._of_token, self._of_row
            into = ((begin * heads + place)[:, None] + padded[:, None] * torch.arange(heads)).flatten()
            taken = (first * heads).repeat_interleave(sizes * heads)
            counted = torch.zeros(len(taken), 1)
            taken[into], counted[into] = torch.arange(len(into)), 1.0
            self._of_heads[heads] = into, taken, counted
        return self._of_heads[heads]

    def blocks(self, heads: int) -> list[tuple[int, int]]:
        """How many rows, of how many tokens with padding, to compute at a time."""
        found = []
        for count, length in self._groups:
            most = count
            if length <= LONGEST_MULTIPLIED:
                most = max(1, _SCORES_AT_A_TIME // (heads * length * length))
            found += [(min(most, count - start), length) for start in range(0, count, most)]
        return found


def _parts(tensor: Tensor, blocks: list[tuple[int, int]], *, key_heads: int) -> list[Tensor]:
    """[places with padding, D] -> [n * K, queries or tokens, D] of each block, views of it."""
    places, size = tensor.shape
    heads = places // sum(count * length for count, length in blocks)
    split = tensor.split_with_sizes([count * length * heads for count, length in blocks])
    return [part.view(count * key_heads, -1, size) for part, (count, _) in zip(split, blocks, strict=True)]


def attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *, rows: RowsOnCpu, scale: float) -> Tensor:
    """[S, Q, D] of query [S, Q, D], key [S, K, D] and value [S, K, D], where `is_flash_of_cpu`."""
    attended: Tensor = _AttentionOnCpu.apply(query, key, value, rows, scale)  # type: ignore[no-untyped-call]
    return attended


class _AttentionOnCpu(torch.autograd.Function):
    """All rows of like lengths at once: rows are short on a CPU, and a call for each would cost more than its numbers.

    Scores of short rows are made as matrices, in float32 or more; torch's flash kernel takes half as long again.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: RowsOnCpu, scale: float
    ) -> Tensor:
        (_, heads, size), key_heads = query.shape, key.shape[1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        padded = [
            each.reshape(-1, size).index_select(0, rows.places(each.shape[1])[1]).to(dtype)
            for each in (query, key, value)
        ]
        out = torch.empty_like(padded[0])
        hidden = torch.full((LONGEST_MULTIPLIED, LONGEST_MULTIPLIED), -torch.inf, dtype=dtype).triu_(1)
        kept = []
        blocks = rows.blocks(heads)
        parts = (_parts(each, blocks, key_heads=key_heads) for each in (*padded, out))
        for (count, length), *part in zip(blocks, *parts, strict=True):
            if length <= LONGEST_MULTIPLIED:
                q, k, v, o = part
                mask = hidden[:length, :length].repeat(heads // key_heads, 1)
                weights = torch.baddbmm(mask, q, k.mT, alpha=scale).softmax(-1)
                torch.bmm(weights, v, out=o)
            else:
                q, k, v, o = (each.view(count, -1, length, size) for each in part)
                attended, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
                    q, k, v, is_causal=True, scale=scale
                )
                o.copy_(attended)
            kept.append(weights)
        any_long = any(length > LONGEST_MULTIPLIED for _, length in blocks)
        ctx.save_for_backward(*padded, out if any_long else None, *kept)
        ctx.rows, ctx.scale = rows, scale
        return out.index_select(0, rows.places(heads)[0]).view(query.shape).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *kept = ctx.saved_tensors
        padded = (query, key, value)
        rows, scale, (num_tokens, heads, size) = ctx.rows, ctx.scale, grad.shape
        key_heads = heads * key.shape[0] // query.shape[0]
        _, taken, counted = rows.places(heads)
        grad_out = grad.reshape(-1, size).index_select(0, taken).to(query.dtype).mul_(counted)
        gradients = [torch.empty_like(each) for each in padded]
        blocks = rows.blocks(heads)
        given = (*padded, grad_out, *gradients, grad_out if out is None else out)
        parts = (_parts(each, blocks, key_heads=key_heads) for each in given)
        for (count, length), weights, *part in zip(blocks, kept, *parts, strict=True):
            if length <= LONGEST_MULTIPLIED:
                q, k, v, g, of_q, of_k, of_v, _ = part
                torch.bmm(weights.mT, g, out=of_v)
                of_scores = torch._softmax_backward_data(torch.bmm(g, v.mT), weights, -1, weights.dtype)  # noqa: SLF001
                of_q.baddbmm_(of_scores, k, beta=0, alpha=scale)
                of_k.baddbmm_(of_scores.mT, q, beta=0, alpha=scale)
            else:
                q, k, v, g, *of_each, o = (each.view(count, -1, length, size) for each in part)
                made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
                    g, q, k, v, o, weights, 0.0, True, scale=scale
                )
                torch._foreach_copy_(of_each, made)
        found = [
            each.index_select(0, rows.places(number)[0]).view(num_tokens, number, size).to(grad.dtype)
            for each, number in zip(gradients, (heads, key_heads, key_heads), strict=True)
        ]
        return (*found, None, None)


class _Blockwise(torch.autograd.Function):
    """Attention in blocks of queries, whose scores are made again in backward (the idea of FlashAttention-2).

    A block of b queries has all scores of its rows at once, [n, K, Q/K * b, up to L], so that memory grows with L and
    not with its square. A sink is one more score of each softmax, without a value: it enters the log-sum-exp alone.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        rows, heads, length, _ = query.shape
        out = value.new_empty(rows, heads, length, value.shape[-1])
        lse = torch.empty(rows, heads, length, dtype=torch.float32, device=query.device)
        for block, keys in _blocks(query, window):
            scores, _ = _scores(query[:, :, block], key[:, :, keys], block, keys, scale=scale, cap=softcap, see=window)
            within = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                within = torch.logaddexp(within, sinks.float().view(1, -1, 1, 1))
            lse[:, :, block] = within[..., 0]
            weights = scores.sub_(within).exp_().to(value.dtype)
            out[:, :, block] = _grouped_matmul(weights, value[:, :, keys])
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.scale, ctx.window, ctx.softcap = scale, window, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        heads, key_heads = query.shape[1], key.shape[1]
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
        # What each query's weighted values lose by normalisation: sum over keys of weight * (grad_out . value).
        lost = (grad_out.float() * out.float()).sum(-1, keepdim=True)
        for block, keys in _blocks(query, ctx.window):
            scores, slope = _scores(
                query[:, :, block],
                key[:, :, keys],
                block,
                keys,
                scale=ctx.scale,
                cap=ctx.softcap,
                see=ctx.window,
            )
            weights = scores.sub_(lse[:, :, block, None]).exp_()
            grad = grad_out[:, :, block]
            grad_value[:, :, keys] += _over_group(weights.transpose(2, 3) @ grad.float(), key_heads)
            gradient = _grouped_matmul(grad, value[:, :, keys].transpose(2, 3)).float()
            gradient = gradient.sub_(lost[:, :, block]).mul_(weights).mul_(ctx.scale)
            if slope is not None:
                gradient = gradient.mul_(slope)
            grad_query[:, :, block] = _grouped_matmul(gradient.to(key.dtype), key[:, :, keys])
            grad_key[:, :, keys] += _over_group(gradient.transpose(2, 3) @ query[:, :, block].float(), key_heads)
        grad_sinks = None
        if sinks is not None:
            share = torch.exp(sinks.float().view(1, heads, 1) - lse)
            grad_sinks = -(share * lost[..., 0]).sum((0, 2)).to(sinks.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None, None


def _blocks(query: Tensor, window: int | None) -> list[tuple[slice, slice]]:
    """Blocks of queries, and the keys that any of them sees."""
    rows, heads, length, _ = query.shape
    widest = length if window is None else min(window, length)
    size = min(length, max(SMALLEST_BLOCK, BLOCK_BYTES // (4 * rows * heads * widest)))
    return [
        (slice(start, stop), slice(0 if window is None else max(0, start - window + 1), stop))
        for start in range(0, length, size)
        for stop in (min(start + size, length),)
    ]


def _scores(  # noqa: PLR0917 - tensors and the places that they are of
    query: Tensor, key: Tensor, block: slice, keys: slice, *, scale: float, cap: float | None, see: int | None
) -> tuple[Tensor, Tensor | None]:
    """fp32 [n, Q, b, keys]: scaled, then capped, then masked; and the slope of the cap, None where there is none."""
    scores = (_grouped_matmul(query, key.transpose(2, 3)) * scale).float()
    slope = None
    if cap is not None:
        bounded = scores.div_(cap).tanh_()
        slope = bounded.square().neg_().add_(1.0)
        scores = bounded.mul_(cap)
    at = torch.arange(block.start, block.stop, device=query.device)[:, None]
    to = torch.arange(keys.start, keys.stop, device=query.device)
    hidden = to > at
    if see is not None:
        hidden |= to <= at - see
    return scores.masked_fill_(hidden, float("-inf")), slope


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[n, Q, a, b] @ [n, K, b, c] -> [n, Q, a, c], where Q / K neighbouring heads share one of K."""
    rows, heads, a, b = left.shape
    key_heads, c = right.shape[1], right.shape[3]
    return (left.reshape(rows, key_heads, (heads // key_heads) * a, b) @ right).reshape(rows, heads, a, c)


def _over_group(gradient: Tensor, key_heads: int) -> Tensor:
    """[n, Q, a, b] -> [n, K, a, b]: the sum over the query heads that share a key head."""
    rows, heads, *sizes = gradient.shape
    return gradient.view(rows, key_heads, heads // key_heads, *sizes).sum(2)


# -- flex ------------------------------------------------------------------------------------------------


def block_masks(starts: Tensor, *, num_tokens: int, windows: Sequence[int]) -> dict[int, Any]:
    """The masks of `flex_attention` for one pack, by window (0: none): made once, and read by every layer.

    Args:
        starts: int32 [rows + 1] on the device of the model, where each row begins, and the end of the last.
        num_tokens: S.
        windows: of the model's attentions.
    """
    return {window: block_mask(starts, num_tokens=num_tokens, window=window) for window in windows}


def block_mask(starts: Tensor, *, num_tokens: int, window: int) -> Any:
    """One of them."""
    from torch.nn.attention.flex_attention import create_block_mask

    # bucketize, not repeat_interleave, which would wait for the device to know how long its output is
    row = torch.bucketize(torch.arange(num_tokens, device=starts.device, dtype=starts.dtype), starts[1:], right=True)

    # Lambdas: flex_attention counts the arguments of what it is given, which a checker of shapes would hide.
    if window:
        seen = lambda _b, _h, at, to: (row[at] == row[to]) & (at >= to) & (at - to < window)  # noqa: E731
    else:
        seen = lambda _b, _h, at, to: (row[at] == row[to]) & (at >= to)  # noqa: E731
    return create_block_mask(seen, None, None, num_tokens, num_tokens, device=str(starts.device))


def _by_flex(
    tensors: tuple[Tensor, Tensor, Tensor], mask: Any, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[n, Q, L, E]."""
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value = tensors
    out, aux = flex(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:  # the share of all scores but the sink in a softmax that has the sink too
        share = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype).view(1, -1, 1))
        out = (out * share[..., None]).to(out.dtype)
    attended: Tensor = out
    return attended


@functools.cache
def capped(softcap: float) -> Callable[..., Tensor]:
    """The score function of flex_attention that bounds scores; the same object for the same bound, compiled once."""
    return lambda score, _b, _h, _at, _to: torch.tanh(score / softcap) * softcap


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)  # packs differ in length
    return compiled


def flex(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention`, compiled: without the compiler it would make all scores."""
    return _compiled_flex()(*args, **kwargs)


# -- varlen, flash -----------------------------------------------------------------------------------------


def _by_flash(  # noqa: PLR0917 - as both take them
    kernel: AttentionKernel,
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: Tensor,
    longest: int,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    """[S, Q, E]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in tensors)
    tokens_and_rows = (query, key, value, starts, starts, longest, longest)
    if kernel == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        gqa = query.shape[1] != key.shape[1]
        out = varlen_attn(*tokens_and_rows, scale=scale, window_size=window, enable_gqa=gqa)
    else:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        cap = softcap or 0.0
        out = flash_attn_varlen_func(
            *tokens_and_rows, softmax_scale=scale, causal=True, window_size=window, softcap=cap
        )
    assert isinstance(out, Tensor)
    return out
