"""The k most probable words of each row, or k given ones, and their log-probabilities of the whole vocabulary.

What distillation and top-k reports need: a teacher's `top_k_logp` gives the words, and the student's
`logp_of_token_ids` its log-probabilities of the same. Over a cut vocabulary that is one collective, and two.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_parallel_plans.logp.chunks import Options, local_head, local_rows, local_slice
from rl_parallel_plans.logp.linear import linear_logp, logp_of
from rl_parallel_plans.logp.logits import logp_of_logits


class TopKLogp(NamedTuple):
    """Log-probabilities and the words that have them, most probable first."""

    logp: Tensor
    """[..., k] fp32 (fp64 for fp64 inputs), differentiable."""
    token_ids: Tensor
    """[..., k] int64. Of equally probable words any may come first, the same on every rank."""


def top_k_logp(
    hidden: Tensor,
    lm_head: nn.Module | Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_axis: str = "tp",
) -> TopKLogp:
    """The k largest of `log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` and their words.

    hidden: [..., H], as `linear_logp` takes it, also sequence-parallel; the other arguments are those of `linear_logp`.
    The gradient is that of the log-probabilities; which words they belong to is taken as given.
    Raises as `linear_logp` does, and ValueError for a k outside [1, V].
    """
    options = Options(temperature=temperature, chunk_size=chunk_size, softcap=softcap, logit_scale=logit_scale)
    head = local_head(lm_head, tp_axis=tp_axis)
    if hidden.ndim < 2 or head.weight.ndim != 2 or hidden.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and lm_head.weight {[head.where.total, *head.weight.shape[1:]]}: "
            "they must be [..., H] and [V, H]"
        )
    _check_k(k, head.where.total)
    leading = hidden.shape[:-1]
    rows, head = local_rows(hidden, head, tp_axis=tp_axis, summed=False)
    logp, _, token_ids = logp_of(rows, head, k, options=options)
    return _shaped(logp, token_ids, leading)


def top_k_logp_from_logits(
    logits: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    tp_axis: str = "tp",
) -> TopKLogp:
    """The k largest of `log_softmax(logits / temperature)` and their words.

    logits: [..., V], as `get_logprobs_from_vocab_parallel_logits` takes them. Raises as `top_k_logp` does.
    """
    options = Options(temperature=temperature, chunk_size=chunk_size)
    local, where = local_slice(logits, dim=-1, tp_axis=tp_axis, what="logits")
    _check_k(k, where.total)
    leading = logits.shape[:-1]
    flat = local.reshape(leading.numel(), where.size)
    logp, _, token_ids = logp_of_logits(flat, k, where=where, options=options)
    return _shaped(logp, token_ids, leading)


def logp_of_token_ids(
    hidden: Tensor,
    lm_head: nn.Module | Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_axis: str = "tp",
) -> Tensor:
    """`log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` at K words of each row.

    hidden: [..., H], as `linear_logp` takes it, also sequence-parallel; the other arguments are those of `linear_logp`.
    token_ids: [..., K] int64 or int32 in [0, V), the same on every rank; a word may be asked for twice.

    Returns logp [..., K], fp32 (fp64 for fp64 inputs), differentiable, plain, the same on every rank; normalised over
    the whole vocabulary, not over the K words. Raises as `linear_logp` does, and ValueError for a K of 0.
    """
    if token_ids.ndim != hidden.ndim or not token_ids.shape[-1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and token_ids {list(token_ids.shape)}: they must be [..., H] and "
            "[..., K], K at least 1; for one word a row, linear_logp takes targets [...]"
        )
    return linear_logp(
        hidden,
        lm_head,
        token_ids,
        temperature=temperature,
        chunk_size=chunk_size,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=None,
        tp_axis=tp_axis,
    )


def _check_k(k: int, total: int) -> None:
    if not 1 <= k <= total:
        raise ValueError(f"k is {k} and the vocabulary has {total} words: k must be from 1 to {total}")


def _shaped(logp: Tensor, token_ids: Tensor | None, leading: torch.Size) -> TopKLogp:
    assert token_ids is not None
    shape = (*leading, logp.shape[-1])
    return TopKLogp(logp=logp.reshape(shape), token_ids=token_ids.reshape(shape))
