"""What chunked log-probabilities compute with: checked inputs, options, and softmax statistics over a sharded vocabulary.

It knows placements, dtypes, padding and refusals; no softmax. Letters: N rows that are asked for, K words in each,
H hidden, V vocabulary.

x = cap(logit_scale * logits) / temperature          cap(y) = softcap * tanh(y / softcap)

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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.dtensor import has_numbers, is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.vocabulary import VocabularySlice, local_slice, require_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The words of an lm_head that this rank holds."""

    weight: Tensor
    """[size, H]"""
    bias: Tensor | None
    """[size]"""
    where: VocabularySlice


def local_head(lm_head: nn.Module, *, tp_axis: str) -> Head:
    """The local weight and bias of a linear layer.

    Raises PlanError for a layer that computes more than `hidden @ weight.T + bias`, and for other placements.
    """
    others = {name for name, _ in lm_head.named_parameters()} - {"weight", "bias"}
    if others:
        raise PlanError(
            f"the lm_head is a {type(lm_head).__qualname__} with the parameters {sorted(others)}, and linear_logp "
            "computes hidden @ weight.T + bias: merge adapters into the weight, or make the logits and call "
            "get_logprobs_from_vocab_parallel_logits"
        )
    weight = lm_head.weight
    assert isinstance(weight, Tensor)
    local, where = local_slice(weight, dim=0, tp_axis=tp_axis, what="lm_head.weight")
    bias = getattr(lm_head, "bias", None)
    if bias is None:
        return Head(weight=local, bias=None, where=where)
    local_bias, of_bias = local_slice(bias, dim=0, tp_axis=tp_axis, what="lm_head.bias")
    if (of_bias.start, of_bias.size, of_bias.total) != (where.start, where.size, where.total):
        raise PlanError(
            f"lm_head.bias holds words {of_bias.start} to {of_bias.start + of_bias.size} of {of_bias.total} and "
            f"lm_head.weight {where.start} to {where.start + where.size} of {where.total}: place both alike"
        )
    return Head(weight=local, bias=local_bias, where=where)


def local_hidden(hidden: Tensor, where: VocabularySlice, *, tp_axis: str, summed: bool) -> Tensor:
    """All rows of `hidden` [..., H], as a plain tensor whose gradient goes back as `hidden` was placed.

    Plain and Replicate are the same on every rank. Shard of a leading dim, as sequence parallelism has it, is gathered.
    summed: the gradient that comes back is whole already; else each rank has its words' part, and they are added:
        an all-reduce, or a reduce-scatter for a sharded one.
    """
    partial = where.is_cut and not summed
    if not is_dtensor(hidden):
        return _SumOverRanks.apply(hidden, where.group) if partial else hidden  # type: ignore[no-untyped-call]
    if hidden.device_mesh.size() == 1:
        return hidden.to_local()
    require_axis(hidden, tp_axis=tp_axis, what="hidden")
    placement = hidden.placements[0]
    features = hidden.ndim - 1
    if placement.is_partial() or placement.is_shard(features):
        raise PlanError(f"hidden is placed {placement}: it may be Replicate(), or Shard of a dim before the last")
    if where.group is not None and where.group.size() != hidden.device_mesh.size():
        raise PlanError(f"hidden lies on {hidden.device_mesh.size()} ranks and the vocabulary on {where.group.size()}")
    if placement.is_replicate():
        whole = hidden.to_local()
        return _SumOverRanks.apply(whole, where.group) if partial else whole  # type: ignore[no-untyped-call]
    from torch.distributed.tensor import Partial, Replicate

    gathered = hidden.redistribute(placements=[Replicate()])
    return gathered.to_local(grad_placements=[Partial() if partial else Replicate()])


class _SumOverRanks(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks, in its place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


def one_dtype(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
    """Both in autocast's dtype where it is on, as a linear layer would take them.

    Cast here, because backward runs outside of autocast and must see the same numbers.
    Raises ValueError where they differ.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        bias = None if head.bias is None else head.bias.to(dtype)
        hidden, head = hidden.to(dtype), replace(head, weight=head.weight.to(dtype), bias=bias)
    if hidden.dtype != head.weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and lm_head.weight is {head.weight.dtype}: cast one of them")
    return hidden, head


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The words asked for, in the rows that ask for any."""

    token_ids: Tensor
    """[N, K], 0 where ignored."""
    rows: Tensor | None
    """[N] indices into all rows; None for all of them."""
    asked: Tensor | None
    """[N, K] bool, None where none of those rows' words is ignored."""
    leading: torch.Size
    """The leading shape of hidden or logits."""
    words_dim: bool
    """Whether the caller's targets have a last axis K."""

    def spread_words(self, values: Tensor) -> Tensor:
        """[N, K] of the rows that ask, as the targets were shaped; 0 where ignored."""
        if self.asked is not None:
            values = values.where(self.asked, 0)
        whole = self._spread(values)
        return whole.reshape((*self.leading, whole.shape[-1]) if self.words_dim else self.leading)

    def spread_rows(self, values: Tensor) -> Tensor:
        """[N] of the rows that ask, as the leading shape; 0 where ignored."""
        return self._spread(values).reshape(self.leading)

    def _spread(self, values: Tensor) -> Tensor:
        if self.rows is None:
            return values
        return values.new_zeros(self.leading.numel(), *values.shape[1:]).index_copy(0, self.rows, values)


def read_targets(targets: Tensor, leading: torch.Size, *, total: int, ignore_index: int | None) -> Targets:
    """Targets [...] or [..., K], `leading` being [...].

    Raises ValueError for a word outside the vocabulary that is not `ignore_index`, which a sharded gather would answer
    with a plausible number.
    """
    if is_dtensor(targets):
        targets = targets.full_tensor()
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: they must be token ids, int64 or int32")
    words_dim = targets.ndim == len(leading) + 1
    words = targets.shape[-1] if words_dim else 1
    token_ids, rows, asked = targets.reshape(leading.numel(), words).long(), None, None
    if not has_numbers(token_ids):  # a forecast: every row costs what a row can cost
        return Targets(token_ids=token_ids, rows=None, asked=None, leading=leading, words_dim=words_dim)
    span = _span(token_ids)
    if ignore_index is not None and (span is None or span[0] <= ignore_index <= span[1]):
        token_ids, rows, asked = _without_ignored(token_ids, ignore_index)
        span = _span(token_ids)
    if span is None:  # without waiting for the device
        torch._assert_async(((token_ids >= 0) & (token_ids < total)).all())  # noqa: SLF001 - no public one
    elif span[0] < 0 or span[1] >= total:
        raise ValueError(
            f"targets span {span[0]} to {span[1]} and the vocabulary 0 to {total - 1}: give rows that ask for nothing "
            "the target ignore_index"
        )
    return Targets(
        token_ids=token_ids, rows=rows, asked=None if words == 1 else asked, leading=leading, words_dim=words_dim
    )


def _span(token_ids: Tensor) -> tuple[int, int] | None:
    """Smallest and largest id; None where asking would wait for the device."""
    if token_ids.device.type != "cpu":
        return None
    if not token_ids.numel():
        return 0, 0
    low, high = token_ids.aminmax()
    return int(low), int(high)


def _without_ignored(token_ids: Tensor, ignore_index: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ids of the rows that ask for any word, 0 where ignored; those rows, None for all; and which ids are asked for."""
    asked = token_ids != ignore_index
    rows = asked.any(-1).nonzero().squeeze(-1)  # waits for the device, once
    if len(rows) == len(asked):
        return token_ids.where(asked, 0), None, asked
    asked = asked[rows]
    return token_ids[rows].where(asked, 0), rows, asked


CHUNK_BYTES = 2**28
"""Most bytes of a chunk's logits where the caller names no chunk size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the public functions, checked."""

    temperature: float = 1.0
    chunk_size: int | None = None
    entropy: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size}: it must be at least 1 row, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}: it must be above 0, or None")

    def rows_at_a_time(self, num_rows: int, words: int, dtype: torch.dtype) -> int:
        """The caller's, or an eighth of the rows: at least 256, that a multiplication is worth its weight's reading.

        At most 1024, beyond which nothing is won, and `CHUNK_BYTES`. Ranks may differ: no collective is per chunk.
        """
        if self.chunk_size is not None:
            return self.chunk_size
        fitting = CHUNK_BYTES // max(1, words * dtype.itemsize)
        return max(1, min(fitting, 1024, max(256, num_rows // 8)))

    def transform_(self, logits: Tensor) -> Tensor:
        """`x` of raw logits, in their place."""
        if self.logit_scale != 1.0:
            logits = logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def slope(self, x: Tensor) -> Tensor | float:
        """dx/dlogits: a number, or a tensor like x under a softcap."""
        factor = self.logit_scale / self.temperature
        if self.softcap is None:
            return factor
        return (x * (self.temperature / self.softcap)).square_().neg_().add_(1.0).mul_(factor)


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """fp32 for anything narrower, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)


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
