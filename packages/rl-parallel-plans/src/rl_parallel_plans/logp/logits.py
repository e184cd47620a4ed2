"""Log-probabilities from logits that exist already, plain or sharded over the vocabulary.

The logits are kept for backward as they are, never gathered, never copied whole, and never written to: chunks that
would share the caller's memory after upcasting are copied before anything is computed in place.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_parallel_plans.logp.chunks import (
    Options,
    Rows,
    TopKLogp,
    Upstream,
    VocabularySlice,
    at_targets,
    local_slice,
    of_top_k,
    read_targets,
    require_k,
    top_k_of,
)


@overload
def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[False] = False,
    ignore_index: int | None = -100,
    tp_axis: str = "tp",
) -> Tensor: ...


@overload
def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[True],
    ignore_index: int | None = -100,
    tp_axis: str = "tp",
) -> tuple[Tensor, Tensor]: ...


def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    ignore_index: int | None = -100,
    tp_axis: str = "tp",
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at `target`, differentiable, for logits that exist already.

    logits: [..., V] plain, or a DTensor Shard(-1) (V need not divide evenly) or Replicate on a mesh with the one axis
        `tp_axis`: what a plan's lm_head returns.
    target: [...] token ids in [0, V), or [..., K] for K tokens in each row; nothing is shifted.
    ignore_index: a row with this target is not looked at: logp, entropy and gradient are 0, as in `linear_logp`.

    Returns logp, shaped as target, fp32 (fp64 for fp64 logits), or (logp, entropy [...]). Raises as `linear_logp` does.
    """
    options = Options(temperature=temperature, chunk_size=chunk_size, entropy=entropy)
    leading = logits.shape[:-1]
    if target.shape[: len(leading)] != leading or target.ndim > logits.ndim:
        raise ValueError(
            f"logits are {list(logits.shape)} and target {list(target.shape)}: [..., V] and [...], or [..., K]"
        )
    local, where = local_slice(logits, dim=-1, tp_axis=tp_axis, what="logits")
    asked = read_targets(target, leading, total=where.total, ignore_index=ignore_index)
    flat = local.reshape(leading.numel(), where.size)
    logp, entropies, _ = logp_of_logits(flat, asked.token_ids, rows=asked.rows, where=where, options=options)
    logp = asked.spread_targets(logp)
    return (logp, asked.spread_rows(entropies)) if entropies is not None else logp


def logp_of_logits(
    logits: Tensor,
    wanted: Tensor | int,
    *,
    rows: Tensor | None = None,
    where: VocabularySlice,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What `linear.logp_of` returns, from local logits [M, size]."""
    return _LogitsLogp.apply(logits, wanted, rows, where, options)  # type: ignore[no-any-return, no-untyped-call]


class _LogitsLogp(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        logits: Tensor,
        wanted: Tensor | int,
        selected: Tensor | None,
        where: VocabularySlice,
        options: Options,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = _rows(logits, selected, where=where, options=options)
        found = of_top_k(rows, wanted) if isinstance(wanted, int) else at_targets(rows, wanted, entropy=options.entropy)
        ctx.save_for_backward(logits, selected, found.token_ids, found.lse, found.entropy)
        ctx.where, ctx.options = where, options
        ctx.set_materialize_grads(False)
        token_ids = found.token_ids if isinstance(wanted, int) else None
        if token_ids is not None:
            ctx.mark_non_differentiable(token_ids)
        return found.logp, found.entropy, token_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        logits, selected, token_ids, lse, entropy = ctx.saved_tensors
        rows = _rows(logits, selected, where=ctx.where, options=ctx.options)
        upstream = Upstream(
            token_ids=token_ids, lse=lse, entropy=entropy, grad_logp=grad_logp, grad_entropy=grad_entropy
        )
        gradient = torch.empty_like(logits) if selected is None else torch.zeros_like(logits)
        for chunk in rows.chunks:
            of_chunk = upstream.logits_gradient(rows.make(chunk), chunk, ctx.where).div_(ctx.options.temperature)
            if selected is None:
                gradient[chunk] = of_chunk
            else:
                gradient.index_copy_(0, selected[chunk], of_chunk.to(gradient.dtype))
        return gradient, None, None, None, None


def _rows(logits: Tensor, selected: Tensor | None, *, where: VocabularySlice, options: Options) -> Rows:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    count = len(logits) if selected is None else len(selected)

    def make(chunk: slice) -> Tensor:
        x = logits[chunk] if selected is None else logits.index_select(0, selected[chunk])
        if options.temperature != 1.0:
            return x.to(dtype) / options.temperature
        return x.to(dtype, copy=where.group is not None)

    chunks = options.chunks(count, where.size, dtype)
    return Rows(make=make, count=count, chunks=chunks, where=where, dtype=dtype, device=logits.device)


def top_k_logp_from_logits(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    tp_axis: str = "tp",
) -> TopKLogp:
    """The k largest of `log_softmax(logits / temperature)` and their tokens.

    logits: [..., V], as `get_logprobs_from_vocab_parallel_logits` takes them. Raises as `top_k_logp` does.
    """
    options = Options(temperature=temperature, chunk_size=chunk_size)
    local, where = local_slice(logits, dim=-1, tp_axis=tp_axis, what="logits")
    require_k(k, where.total)
    leading = logits.shape[:-1]
    flat = local.reshape(leading.numel(), where.size)
    logp, _, token_ids = logp_of_logits(flat, k, where=where, options=options)
    return top_k_of(logp, token_ids, leading)
