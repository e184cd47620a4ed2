"""What callers hand over, made into what the mathematics takes: local tensors, rows [N, H], targets [N, K].

It knows placements, dtypes, padding and refusals; no softmax. Letters: N rows that are asked for, K words in each,
H hidden, V vocabulary.
"""

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
