"""What chunked log-probabilities compute with: checked inputs, options, softmax over a sharded vocabulary.

Logits come chunk by chunk and never all at once. Statistics are fp32 (fp64 for fp64 logits). N rows, K targets in each,
H hidden, V vocabulary:

    x = cap(logit_scale * logits) / temperature          cap(y) = softcap * tanh(y / softcap)
    logp[n, k] = x[n, t_k] - lse[n]          lse[n] = log sum_v exp(x[n, v])
    H[n]       = lse[n] - sum_v p[n, v] x[n, v]
    d/dx[n, v] (sum_k g_k logp_k + h H) = sum_k g_k (1[v = t_k] - p[n, v]) - h p[n, v] (log p[n, v] + H[n])

Over ranks, r holding the slice [start, start + size): M = max_r lse_r, w_r = exp(lse_r - M), then one sum of
(w_r, x[t] of the owner, w_r sum_v p_r x) gives all three: two collectives, whatever the number of chunks. The largest
k tokens of all are among the largest k of each rank: one collective carries these and lse_r.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_parallel_plans.dtensor import has_numbers, is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The slice [start, start + size) of a vocabulary of `total` tokens that this rank holds.

    DTensor gives ceil(total / ranks) tokens to each rank, so the last ranks may hold fewer, or none.
    """

    start: int
    size: int
    total: int
    group: "dist.ProcessGroup | None"
    """The ranks that together hold the whole vocabulary; None where this rank holds all of it."""

    def owned(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as indices into the slice (0 where foreign), and which of them it owns."""
        index = targets - self.start
        mine = (index >= 0) & (index < self.size)
        return index.where(mine, 0), mine

    def sizes(self) -> list[int]:
        """Words of each rank of the group, in its order."""
        if self.group is None:
            return [self.size]
        share = -(-self.total // self.group.size())
        return [max(0, min(share, self.total - rank * share)) for rank in range(self.group.size())]


def local_slice(tensor: Tensor, *, dim: int, tp_axis: str, what: str) -> tuple[Tensor, VocabularySlice]:
    """This rank's piece of a tensor whose `dim` is the vocabulary, plain or cut over `tp_axis`, and which piece it is.

    A mesh of one rank may have any axes: nothing is cut.
    Raises PlanError for any other placement.
    """
    total, dim = tensor.shape[dim], dim % tensor.ndim
    if not is_dtensor(tensor):
        return tensor, VocabularySlice(start=0, size=total, total=total, group=None)
    local = tensor.to_local()
    if tensor.device_mesh.size() == 1:
        return local, VocabularySlice(start=0, size=total, total=total, group=None)
    require_axis(tensor, tp_axis=tp_axis, what=what)
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if placement.is_replicate():
        return local, VocabularySlice(start=0, size=total, total=total, group=None)
    if not placement.is_shard(dim):
        raise PlanError(f"{what} is placed {placement}: it may be Shard({dim}) or Replicate()")
    start = min(total, mesh.get_local_rank() * -(-total // mesh.size()))
    return local, VocabularySlice(start=start, size=local.shape[dim], total=total, group=mesh.get_group())


def require_axis(tensor: "DTensor", *, tp_axis: str, what: str) -> None:
    """Refuse a DTensor whose mesh has another axis than `tp_axis`, or more."""
    names = tensor.device_mesh.mesh_dim_names
    if names != (tp_axis,):
        raise PlanError(
            f"{what} lies on a mesh with the axes {names}, and its only axis may be {tp_axis!r}: under "
            "FSDP, call this in a forward of the wrapped model (torch.distributed.fsdp.register_fsdp_forward_method), "
            "where the parameter is gathered; a tp axis with another name is passed as tp_axis="
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The tokens of an lm_head that this rank holds."""

    weight: Tensor
    """[size, H]"""
    bias: Tensor | None
    """[size]"""
    where: VocabularySlice


def local_head(lm_head: nn.Module | Tensor, *, tp_axis: str) -> Head:
    """The local weight and bias of a linear layer, or the local part of a weight alone.

    Raises PlanError for a layer that computes more than `hidden @ weight.T + bias`, and for other placements.
    """
    if isinstance(lm_head, Tensor):
        local, where = local_slice(lm_head, dim=0, tp_axis=tp_axis, what="lm_head")
        return Head(weight=local, bias=None, where=where)
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


def local_rows(hidden: Tensor, head: Head, *, tp_axis: str, summed: bool) -> tuple[Tensor, Head]:
    """All rows of `hidden` [..., H] as a plain [N, H] tensor, and the head, both in the dtype that they multiply in.

    A plain or Replicate `hidden` is the same on every rank. Shard of a leading dim, as in sequence parallelism, is
    gathered. The gradient goes back with the placement of `hidden`.
    summed: the returned gradient is complete on every rank. Otherwise each rank returns the part of its own slice of
        the vocabulary, and the parts are added by an all-reduce, or by a reduce-scatter for a sharded `hidden`.

    Raises PlanError for another placement, ValueError for a hidden and a weight of different dtypes.
    """
    group = head.where.group
    partial = group is not None and not summed
    if not is_dtensor(hidden):
        whole = _SumOverRanks.apply(hidden, group) if partial else hidden  # type: ignore[no-untyped-call]
    elif hidden.device_mesh.size() == 1:
        whole = hidden.to_local()
    else:
        require_axis(hidden, tp_axis=tp_axis, what="hidden")
        placement, ranks = hidden.placements[0], hidden.device_mesh.size()
        if placement.is_partial() or placement.is_shard(hidden.ndim - 1):
            raise PlanError(f"hidden is placed {placement}: it may be Replicate(), or Shard of a dim before the last")
        if group is not None and group.size() != ranks:
            raise PlanError(f"hidden lies on {ranks} ranks and the vocabulary on {group.size()}")
        if placement.is_replicate():
            whole = hidden.to_local()
            whole = _SumOverRanks.apply(whole, group) if partial else whole  # type: ignore[no-untyped-call]
        else:
            from torch.distributed.tensor import Partial, Replicate

            gathered = hidden.redistribute(placements=[Replicate()])
            whole = gathered.to_local(grad_placements=[Partial() if partial else Replicate()])

    # Under autocast, cast here as a linear layer would: backward runs outside autocast and must see the same numbers.
    rows, device = whole.flatten(0, -2), hidden.device.type
    if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        bias = None if head.bias is None else head.bias.to(dtype)
        rows, head = rows.to(dtype), replace(head, weight=head.weight.to(dtype), bias=bias)
    if rows.dtype != head.weight.dtype:
        raise ValueError(f"hidden is {rows.dtype} and lm_head.weight is {head.weight.dtype}: cast one of them")
    return rows, head


class _SumOverRanks(torch.autograd.Function):
    """Identity; the gradient is summed over the ranks, in place."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The tokens asked for, in the rows that ask for any."""

    token_ids: Tensor
    """[N, K], 0 where ignored."""
    rows: Tensor | None
    """[N] indices into all rows; None for all of them."""
    asked: Tensor | None
    """[N, K] bool, None where none of those rows' tokens is ignored."""
    leading: torch.Size
    """The leading shape of hidden or logits."""
    has_k_dim: bool
    """Whether the caller's targets have a last axis K."""

    def spread_targets(self, values: Tensor) -> Tensor:
        """[N, K] of the rows that ask, as the targets were shaped; 0 where ignored."""
        if self.asked is not None:
            values = values.where(self.asked, 0)
        if self.rows is not None:
            whole = values.new_zeros(self.leading.numel(), values.shape[1])
            values = whole.index_copy(0, self.rows, values)
        return values.reshape((*self.leading, values.shape[1]) if self.has_k_dim else self.leading)

    def spread_rows(self, values: Tensor) -> Tensor:
        """[N] of the rows that ask, as the leading shape; 0 where ignored."""
        if self.rows is not None:
            values = values.new_zeros(self.leading.numel()).index_copy(0, self.rows, values)
        return values.reshape(self.leading)


def read_targets(targets: Tensor, leading: torch.Size, *, total: int, ignore_index: int | None) -> Targets:
    """Targets [...] or [..., K], `leading` being [...].

    Raises ValueError for a token outside the vocabulary that is not `ignore_index`, which a sharded gather would answer
    with a plausible number.
    """
    if is_dtensor(targets):
        targets = targets.full_tensor()
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: they must be token ids, int64 or int32")
    has_k_dim = targets.ndim == len(leading) + 1
    words = targets.shape[-1] if has_k_dim else 1
    token_ids, rows, asked = targets.reshape(leading.numel(), words).long(), None, None
    if not has_numbers(token_ids):  # a forecast: every row costs what a row can cost
        return Targets(token_ids=token_ids, rows=None, asked=None, leading=leading, has_k_dim=has_k_dim)

    # The smallest and largest id are read only on the CPU: elsewhere that would wait for the device.
    on_cpu = token_ids.device.type == "cpu" and token_ids.numel() > 0
    low, high = map(int, token_ids.aminmax()) if on_cpu else (0, 0)

    # Keep the rows with at least one target; of those, ignored targets become 0.
    if ignore_index is not None and (token_ids.device.type != "cpu" or low <= ignore_index <= high):
        asked = token_ids != ignore_index
        rows = asked.any(-1).nonzero().squeeze(-1)  # waits for the device, once
        if len(rows) == len(asked):
            rows, token_ids = None, token_ids.where(asked, 0)
        else:
            asked = asked[rows]
            token_ids = token_ids[rows].where(asked, 0)
        on_cpu = on_cpu and token_ids.numel() > 0
        low, high = map(int, token_ids.aminmax()) if on_cpu else (0, 0)

    if token_ids.device.type != "cpu":  # without waiting for the device
        torch._assert_async(((token_ids >= 0) & (token_ids < total)).all())  # noqa: SLF001 - no public one
    elif low < 0 or high >= total:
        raise ValueError(
            f"targets span {low} to {high} and the vocabulary 0 to {total - 1}: give rows that ask for nothing "
            "the target ignore_index"
        )
    return Targets(
        token_ids=token_ids, rows=rows, asked=None if words == 1 else asked, leading=leading, has_k_dim=has_k_dim
    )


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

    def chunks(self, num_rows: int, words: int, dtype: torch.dtype) -> list[slice]:
        """Slices of `chunk_size` rows that cover all `num_rows`, for logits of `words` columns in `dtype`.

        Without a chunk_size: an eighth of the rows, and at least 256, so that a multiplication is worth reading the
        weight; at most 1024, beyond which nothing is gained, and at most `CHUNK_BYTES`. Ranks may differ: there is no
        collective per chunk.
        """
        size = self.chunk_size
        if size is None:
            size = max(1, min(CHUNK_BYTES // max(1, words * dtype.itemsize), 1024, max(256, num_rows // 8)))
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


# log p of a token that has no probability: low enough for exp to give 0, high enough for 0 * it to be 0.
NO_PROBABILITY = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Logits of N rows over this rank's tokens, in the dtype of the statistics, made when asked for."""

    make: Callable[[slice], Tensor]
    """[n, size] for a slice of rows. The receiver may overwrite it over a sharded vocabulary, not over a whole one."""
    count: int
    chunks: list[slice]
    """Slices that cover all rows, and no later rows than there are."""
    where: VocabularySlice
    dtype: torch.dtype
    """Of the statistics: fp32 for narrower logits, otherwise their own."""
    device: torch.device


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
    if rows.where.group is not None:
        return _at_targets_over_ranks(rows, targets, entropy=entropy)
    logp = targets.new_empty(targets.shape, dtype=rows.dtype)
    entropies = targets.new_empty(rows.count, dtype=rows.dtype) if entropy else None
    for chunk in rows.chunks:
        log_p = rows.make(chunk).log_softmax(-1)
        logp[chunk] = log_p.gather(-1, targets[chunk])
        if entropies is not None:
            entropies[chunk] = torch.special.entr(log_p.exp_()).sum(-1)
        del log_p  # before the next chunk makes its own
    return Statistics(logp=logp, token_ids=targets, entropy=entropies)


def _at_targets_over_ranks(rows: Rows, targets: Tensor, *, entropy: bool) -> Statistics:
    import torch.distributed as dist

    group, width = rows.where.group, targets.shape[1]
    lse = targets.new_full((rows.count,), -torch.inf, dtype=rows.dtype)
    sums = targets.new_zeros((width + 1 + entropy, rows.count), dtype=rows.dtype)  # x at targets, w, w * mean of x
    index, mine = rows.where.owned(targets)
    for chunk in rows.chunks if rows.where.size else ():
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
    """Log-probabilities and ids of each row's k most probable tokens, most probable first."""
    sizes = rows.where.sizes()
    width, own = min(k, max(sizes)), min(k, rows.where.size)
    lse = torch.full((rows.count,), -torch.inf, dtype=rows.dtype, device=rows.device)
    values = lse.new_full((rows.count, width), -torch.inf)
    ids = values.new_zeros(values.shape, dtype=torch.int64)
    for chunk in rows.chunks if own else ():
        x = rows.make(chunk)
        values[chunk, :own], found = x.topk(own)
        ids[chunk, :own] = found.add_(rows.where.start)
        lse[chunk] = x.logsumexp(-1) if rows.where.group is None else _logsumexp_(x)
        del x, found  # before the next chunk makes its own
    if rows.where.group is None:
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
    owned = [min(width, size) for size in sizes]  # what is behind them is no token
    numbers = [of_rank[:, 1 : 1 + own] for of_rank, own in zip(of_ranks, owned, strict=True)]
    token_ids = [of_rank[:, 1 + width : 1 + width + own] for of_rank, own in zip(of_ranks, owned, strict=True)]
    return (
        of_ranks[..., 0].contiguous().view(values.dtype).logsumexp(0),
        torch.cat(numbers, -1).view(values.dtype),
        torch.cat(token_ids, -1).long(),
    )


def _of_slice(x: Tensor, index: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits at the index, lse and, for the entropy, the mean of x under the slice's own softmax. Overwrites x.

    A function, so that a chunk's tensors are freed before the next chunk's are made.
    """
    at = x.gather(-1, index)
    if not entropy:
        return at, _logsumexp_(x), None
    lse = x.logsumexp(-1)
    finite = lse.nan_to_num(neginf=0.0)  # a slice without a possible token has no mean
    p = x.sub_(finite[:, None]).exp_()
    return at, lse, finite - torch.special.entr(p, out=p).sum(-1)


def _logsumexp_(x: Tensor) -> Tensor:
    """`x.logsumexp(-1)`; overwrites x."""
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
        """d(sum grad_logp logp + grad_entropy H)/dx for one chunk [n, size]. Overwrites x over a sharded vocabulary."""
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
        if where.group is None:
            return gradient.scatter_add_(-1, token_ids, grad_logp)
        index, mine = where.owned(token_ids)
        return gradient.scatter_add_(-1, index, grad_logp.where(mine, 0)) if where.size else gradient


class TopKLogp(NamedTuple):
    """Log-probabilities and the tokens that have them, most probable first."""

    logp: Tensor
    """[..., k] fp32 (fp64 for fp64 inputs), differentiable."""
    token_ids: Tensor
    """[..., k] int64. Of equally probable tokens any may come first, the same on every rank."""


def top_k_of(logp: Tensor, token_ids: Tensor | None, leading: torch.Size) -> TopKLogp:
    """Rows [N, k] in the leading shape of the inputs."""
    assert token_ids is not None
    shape = (*leading, logp.shape[-1])
    return TopKLogp(logp=logp.reshape(shape), token_ids=token_ids.reshape(shape))


def require_k(k: int, total: int) -> None:
    """Refuse to look for more tokens than the vocabulary has."""
    if not 1 <= k <= total:
        raise ValueError(f"k is {k} and the vocabulary has {total} words: k must be from 1 to {total}")
