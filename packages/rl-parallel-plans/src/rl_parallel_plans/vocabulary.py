"""Log-probability and entropy of targets under a softmax over a vocabulary that may be cut over ranks.

It knows rows of logits that it asks for chunk by chunk, never where they come from, and never holds all of them.

    logp[n] = x[n, t] - lse[n]          lse[n] = log sum_v exp(x[n, v])
    H[n]    = lse[n] - sum_v p[n, v] x[n, v]
    d/dx[n, v] (g logp + h H) = g[n] (1[v = t] - p[n, v]) - h[n] p[n, v] (log p[n, v] + H[n])

Over ranks, r holding the slice [start, start + size): M = max_r lse_r, w_r = exp(lse_r - M), then one sum of
(w_r, x[t] of the owner, w_r sum_v p_r x) gives all three: two collectives, whatever the number of chunks.

Axes: N rows, V vocabulary. Statistics are fp32 (fp64 for fp64 logits).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    import torch.distributed as dist

Rows = Callable[[slice], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The slice [start, start + size) of `total` words that this rank holds, and the group that holds them all."""

    start: int
    size: int
    total: int
    group: "dist.ProcessGroup | None"

    def owned(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as indices into the slice (0 where foreign), and which of them it owns."""
        index = targets - self.start
        mine = (index >= 0) & (index < self.size)
        return index.where(mine, 0), mine


def local_slice(tensor: Tensor, *, dim: int, tp_axis: str, what: str) -> tuple[Tensor, VocabularySlice]:
    """This rank's piece of a tensor whose `dim` is the vocabulary, plain or cut over `tp_axis`, and which piece it is.

    A mesh of one rank may have any axes: nothing is cut.
    Raises PlanError for any other placement.
    """
    total = tensor.shape[dim]
    if not is_dtensor(tensor):
        return tensor, VocabularySlice(start=0, size=total, total=total, group=None)
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if mesh.size() == 1:
        return tensor.to_local(), VocabularySlice(start=0, size=total, total=total, group=None)
    if mesh.mesh_dim_names != (tp_axis,):
        raise PlanError(
            f"{what} lies on a mesh with the axes {mesh.mesh_dim_names}, and its only axis may be {tp_axis!r}: under "
            "FSDP, call this in a forward of the wrapped model (torch.distributed.fsdp.register_fsdp_forward_method), "
            "where the parameter is gathered; a tp axis with another name is passed as tp_axis="
        )
    if placement.is_replicate():
        return tensor.to_local(), VocabularySlice(start=0, size=total, total=total, group=None)
    if not placement.is_shard(dim % tensor.ndim):
        raise PlanError(f"{what} is placed {placement}: it may be Shard({dim % tensor.ndim}) or Replicate()")
    local = tensor.to_local()
    start = min(total, mesh.get_local_rank() * -(-total // mesh.size()))  # DTensor cuts ceil(total / ranks) each
    return local, VocabularySlice(start=start, size=local.shape[dim], total=total, group=mesh.get_group())


def check_targets(targets: Tensor, total: int) -> None:
    """Refuse a target outside the vocabulary, which a sharded gather would answer with a plausible number."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: they must be token ids, int64 or int32")
    if not targets.numel():
        return
    if targets.device.type != "cpu":  # without waiting for the device
        torch._assert_async(((targets >= 0) & (targets < total)).all())  # noqa: SLF001 - no public one
        return
    low, high = (bound.item() for bound in targets.aminmax())
    if low < 0 or high >= total:
        raise ValueError(
            f"targets span {low} to {high} and the vocabulary 0 to {total - 1}: replace padding targets by any token "
            "id and mask the result"
        )


def chunks(num_rows: int, chunk_size: int) -> Iterator[slice]:
    """Slices that cover `num_rows` in steps of `chunk_size`."""
    return (slice(start, min(start + chunk_size, num_rows)) for start in range(0, num_rows, chunk_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatistics:
    """What forward returns and backward needs again, each [N]."""

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    """None where the whole vocabulary is here: the fused softmax kernels then need none."""


def target_statistics(
    rows: Rows, targets: Tensor, *, where: VocabularySlice, chunk_size: int, entropy: bool, dtype: torch.dtype
) -> TargetStatistics:
    """Statistics of each row at its target; `rows(slice)` makes that chunk's logits [n, size] in `dtype`."""
    new = targets.new_empty
    if where.group is None:
        logp, entropies = new(targets.shape, dtype=dtype), new(targets.shape if entropy else 0, dtype=dtype)
        for chunk in chunks(len(targets), chunk_size):
            logp[chunk], of_chunk = _of_whole(rows(chunk), targets[chunk], entropy=entropy)
            if of_chunk is not None:
                entropies[chunk] = of_chunk
        return TargetStatistics(logp=logp, entropy=entropies if entropy else None, lse=None)
    return _over_ranks(rows, targets, where=where, chunk_size=chunk_size, entropy=entropy, dtype=dtype)


# Functions of their own, so that a chunk's tensors are gone before the next chunk's are made.


def _of_whole(x: Tensor, targets: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probability and entropy of a chunk with the whole vocabulary."""
    log_p = x.log_softmax(-1)
    logp = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return logp, torch.special.entr(log_p.exp_()).sum(-1) if entropy else None


def _of_slice(x: Tensor, index: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """lse, logit at the index and, for the entropy, the mean of x under the slice's own softmax."""
    lse = x.logsumexp(-1)
    target_logits = x.gather(-1, index[:, None]).squeeze(-1)
    return lse, target_logits, lse - torch.special.entr((x - lse[:, None]).exp_()).sum(-1) if entropy else None


def _over_ranks(
    rows: Rows, targets: Tensor, *, where: VocabularySlice, chunk_size: int, entropy: bool, dtype: torch.dtype
) -> TargetStatistics:
    import torch.distributed as dist

    lse = targets.new_full(targets.shape, -torch.inf, dtype=dtype)
    sums = targets.new_zeros((3 if entropy else 2, len(targets)), dtype=dtype)  # weight, target logit, weight * mean x
    index, mine = where.owned(targets)
    for chunk in chunks(len(targets) if where.size else 0, chunk_size):
        lse[chunk], target_logits, mean = _of_slice(rows(chunk), index[chunk], entropy=entropy)
        sums[1, chunk] = target_logits.where(mine[chunk], 0)
        if mean is not None:
            sums[2, chunk] = mean
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=where.group)
    sums[0] = (lse - largest).exp_()
    if entropy:
        sums[2] *= sums[0]
    dist.all_reduce(sums, group=where.group)
    lse = largest + sums[0].log()
    return TargetStatistics(logp=sums[1] - lse, entropy=lse - sums[2] / sums[0] if entropy else None, lse=lse)


def logits_gradient(
    x: Tensor, lse: Tensor | None, *, targets: tuple[Tensor, Tensor | None], grad_logp: Tensor
) -> Tensor:
    """d(sum grad_logp logp)/dx for one chunk [n, size]; `targets` are indices into the slice and which are its own."""
    index, mine = targets
    p = x.softmax(-1) if lse is None else (x - lse[:, None]).exp_()
    gradient = p.mul_(-grad_logp[:, None])
    if gradient.shape[-1]:
        at_target = grad_logp if mine is None else grad_logp.where(mine, 0)
        gradient.scatter_add_(-1, index[:, None], at_target[:, None])
    return gradient


def entropy_gradient(x: Tensor, lse: Tensor | None, *, entropy: Tensor, grad_entropy: Tensor) -> Tensor:
    """d(sum grad_entropy H)/dx for one chunk [n, size]."""
    p = x.softmax(-1) if lse is None else (x - lse[:, None]).exp_()
    # xlogy: a word of probability 0 adds 0, where 0 * log 0 would be NaN.
    return torch.xlogy(p, p).add_(p * entropy[:, None]).mul_(-grad_entropy[:, None])
