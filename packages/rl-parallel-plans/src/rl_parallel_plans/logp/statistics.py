"""Log-probabilities, entropy and the largest entries of a softmax over a vocabulary that may be cut over ranks.

It knows rows of logits that it asks for chunk by chunk, never where they come from, and never holds all of them.

    logp[n, k] = x[n, t_k] - lse[n]          lse[n] = log sum_v exp(x[n, v])
    H[n]       = lse[n] - sum_v p[n, v] x[n, v]
    d/dx[n, v] (sum_k g_k logp_k + h H) = sum_k g_k (1[v = t_k] - p[n, v]) - h p[n, v] (log p[n, v] + H[n])

Over ranks, r holding the slice [start, start + size): M = max_r lse_r, w_r = exp(lse_r - M), then one sum of
(w_r, x[t] of the owner, w_r sum_v p_r x) gives all three: two collectives, whatever the number of chunks. The largest
k words of all are among the largest k of each rank: one collective carries these and lse_r.

Axes: N rows, K words asked for in each, V vocabulary. Statistics are fp32 (fp64 for fp64 logits).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_parallel_plans.vocabulary import VocabularySlice

# log p of a word that has no probability: low enough for exp to give 0, high enough for 0 * it to be 0.
NO_PROBABILITY = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Logits of N rows over this rank's words, in the dtype of the statistics, made when asked for."""

    make: Callable[[slice], Tensor]
    """[n, size] for a slice of rows. Over a cut vocabulary the receiver may overwrite it, over a whole one never."""
    count: int
    chunk_size: int
    where: VocabularySlice
    dtype: torch.dtype
    device: torch.device

    def chunks(self) -> Iterator[slice]:
        """Slices that cover all rows, and no later rows than there are."""
        return (
            slice(start, min(start + self.chunk_size, self.count)) for start in range(0, self.count, self.chunk_size)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What forward returns and backward needs again."""

    logp: Tensor
    """[N, K]"""
    token_ids: Tensor
    """[N, K]"""
    entropy: Tensor | None = None
    """[N]"""
    lse: Tensor | None = None
    """[N], None where the whole vocabulary is here: the fused softmax kernels then need none."""


def at_targets(rows: Rows, targets: Tensor, *, entropy: bool) -> Statistics:
    """Statistics of each row at its targets [N, K]."""
    if rows.where.is_cut:
        return _at_targets_over_ranks(rows, targets, entropy=entropy)
    logp = targets.new_empty(targets.shape, dtype=rows.dtype)
    entropies = targets.new_empty(rows.count if entropy else 0, dtype=rows.dtype)
    for chunk in rows.chunks():
        logp[chunk], of_chunk = _of_whole(rows.make(chunk), targets[chunk], entropy=entropy)
        if of_chunk is not None:
            entropies[chunk] = of_chunk
    return Statistics(logp=logp, token_ids=targets, entropy=entropies if entropy else None)


def _at_targets_over_ranks(rows: Rows, targets: Tensor, *, entropy: bool) -> Statistics:
    import torch.distributed as dist

    group, width = rows.where.group, targets.shape[1]
    lse = targets.new_full((rows.count,), -torch.inf, dtype=rows.dtype)
    sums = targets.new_zeros((width + 1 + entropy, rows.count), dtype=rows.dtype)  # x at targets, w, w * mean of x
    index, mine = rows.where.owned(targets)
    for chunk in rows.chunks() if rows.where.size else ():
        at, lse[chunk], mean = _of_slice(rows.make(chunk), index[chunk], entropy=entropy)
        sums[:width, chunk] = at.where(mine[chunk], 0).t()
        if mean is not None:
            sums[-1, chunk] = mean
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    weight = (lse - largest).exp_()
    sums[width] = weight
    if entropy:
        sums[-1] *= weight
    dist.all_reduce(sums, group=group)
    lse = largest + sums[width].log()
    return Statistics(
        logp=sums[:width].t() - lse[:, None],
        token_ids=targets,
        entropy=lse - sums[-1] / sums[width] if entropy else None,
        lse=lse,
    )


def of_top_k(rows: Rows, k: int) -> Statistics:
    """Log-probabilities and ids of each row's k most probable words, most probable first."""
    sizes = rows.where.sizes()
    width, own = min(k, max(sizes)), min(k, rows.where.size)
    lse = torch.full((rows.count,), -torch.inf, dtype=rows.dtype, device=rows.device)
    values = lse.new_full((rows.count, width), -torch.inf)
    ids = values.new_zeros(values.shape, dtype=torch.int64)
    for chunk in rows.chunks() if own else ():
        x = rows.make(chunk)
        values[chunk, :own], found = x.topk(own)
        ids[chunk, :own] = found.add_(rows.where.start)
        lse[chunk] = _logsumexp_(x) if rows.where.is_cut else x.logsumexp(-1)
        del x, found  # before the next chunk makes its own
    if not rows.where.is_cut:
        return Statistics(logp=values - lse[:, None], token_ids=ids)
    lse, values, ids = _candidates(lse, values, ids, where=rows.where)
    values, best = values.topk(k)
    return Statistics(logp=values - lse[:, None], token_ids=ids.gather(-1, best), lse=lse)


def _candidates(lse: Tensor, values: Tensor, ids: Tensor, *, where: VocabularySlice) -> tuple[Tensor, Tensor, Tensor]:
    """The whole lse, and values and ids of all ranks side by side, by one collective of as many bits as they have."""
    import torch.distributed as dist

    assert where.group is not None
    width, sizes = values.shape[1], where.sizes()
    as_integers = torch.int64 if values.dtype == torch.float64 else torch.int32
    packed = torch.cat([lse[:, None].view(as_integers), values.view(as_integers), ids.to(as_integers)], -1)
    of_ranks = packed.new_empty((len(sizes), *packed.shape))
    dist.all_gather(list(of_ranks), packed, group=where.group)
    owned = [min(width, size) for size in sizes]  # what lies behind them is no word
    numbers = [of_rank[:, 1 : 1 + own] for of_rank, own in zip(of_ranks, owned, strict=True)]
    words = [of_rank[:, 1 + width : 1 + width + own] for of_rank, own in zip(of_ranks, owned, strict=True)]
    return (
        of_ranks[..., 0].contiguous().view(values.dtype).logsumexp(0),
        torch.cat(numbers, -1).view(values.dtype),
        torch.cat(words, -1).long(),
    )


# Functions of their own, so that a chunk's tensors are gone before the next chunk's are made.


def _of_whole(x: Tensor, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropy of a chunk with the whole vocabulary."""
    log_p = x.log_softmax(-1)
    logp = log_p.gather(-1, targets)
    return logp, torch.special.entr(log_p.exp_()).sum(-1) if entropy else None


def _of_slice(x: Tensor, index: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits at the index, lse and, for the entropy, the mean of x under the slice's own softmax. Overwrites x."""
    at = x.gather(-1, index)
    if not entropy:
        return at, _logsumexp_(x), None
    lse = x.logsumexp(-1)
    finite = lse.nan_to_num(neginf=0.0)  # a slice without a possible word has no mean
    p = x.sub_(finite[:, None]).exp_()
    return at, lse, finite - torch.special.entr(p, out=p).sum(-1)


def _logsumexp_(x: Tensor) -> Tensor:
    """`x.logsumexp(-1)` in the place of x."""
    largest = x.amax(-1, keepdim=True).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return x.sub_(largest).exp_().sum(-1).log_().add_(largest.squeeze(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """What backward is given, beside what forward kept."""

    token_ids: Tensor
    """[N, K]"""
    lse: Tensor | None
    entropy: Tensor | None
    grad_logp: Tensor | None
    """[N, K]"""
    grad_entropy: Tensor | None
    """[N]"""

    def logits_gradient(self, x: Tensor, chunk: slice, where: VocabularySlice) -> Tensor:
        """d(sum grad_logp logp + grad_entropy H)/dx for one chunk [n, size]. Overwrites x over a cut vocabulary."""
        token_ids = self.token_ids[chunk]
        grad_logp = x.new_zeros(token_ids.shape) if self.grad_logp is None else self.grad_logp[chunk]
        of_all = grad_logp if grad_logp.shape[1] == 1 else grad_logp.sum(-1, keepdim=True)
        if self.entropy is None or self.grad_entropy is None:
            p = x.softmax(-1) if self.lse is None else x.sub_(self.lse[chunk, None]).exp_()
            gradient = p.mul_(-of_all)
        else:
            log_p = x.log_softmax(-1) if self.lse is None else x.sub_(self.lse[chunk, None])
            p = log_p.exp()
            log_p.clamp_(min=NO_PROBABILITY).add_(self.entropy[chunk, None])
            gradient = log_p.mul_(self.grad_entropy[chunk, None]).add_(of_all).mul_(p.neg_())
        if not where.is_cut:
            return gradient.scatter_add_(-1, token_ids, grad_logp)
        index, mine = where.owned(token_ids)
        return gradient.scatter_add_(-1, index, grad_logp.where(mine, 0)) if where.size else gradient
