"""The linear layer and the softmax as one differentiable function of rows, in plain torch.

It knows local tensors and which words they are. It gives the gradient of its own words: what has to be summed over
ranks is summed by whoever gave it `hidden`. Chunks of the weight's gradient add up in fp32: their sum in bf16 would
lose what each of them adds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rl_parallel_plans.logp.inputs import Head
from rl_parallel_plans.logp.options import Options, statistics_dtype
from rl_parallel_plans.logp.statistics import Rows, Upstream, at_targets, of_top_k
from rl_parallel_plans.vocabulary import VocabularySlice

# Below this, making logits twice costs more time than keeping them costs memory: tiny models on a CPU live here.
KEPT_BYTES = 2**20


def logp_of(
    hidden: Tensor, head: Head, wanted: Tensor | int, *, rows: Tensor | None = None, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities [N, K], entropy [N] if asked for, and the token ids [N, K] where they were not given.

    hidden: [M, H]; rows: [N] indices of those that are wanted, None for all.
    wanted: token ids [N, K], or K for the K most probable words.
    """
    return _LinearLogp.apply(hidden, head.weight, head.bias, wanted, rows, head.where, options)  # type: ignore[no-any-return, no-untyped-call]


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Tensor | int,
        selected: Tensor | None,
        where: VocabularySlice,
        options: Options,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows, kept = _rows(hidden, weight, bias, selected=selected, where=where, options=options), None
        if rows.count * where.size * rows.dtype.itemsize <= KEPT_BYTES:
            kept = rows.make(slice(0, rows.count))
            rows = _kept_rows(kept, where)
        found = of_top_k(rows, wanted) if isinstance(wanted, int) else at_targets(rows, wanted, entropy=options.entropy)
        ctx.save_for_backward(hidden, weight, bias, selected, kept, found.token_ids, found.lse, found.entropy)
        ctx.where, ctx.options = where, options
        ctx.set_materialize_grads(False)
        token_ids = found.token_ids if isinstance(wanted, int) else None
        if token_ids is not None:
            ctx.mark_non_differentiable(token_ids)
        return found.logp, found.entropy, token_ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, selected, kept, token_ids, lse, entropy = ctx.saved_tensors
        rows = _rows(hidden, weight, bias, selected=selected, where=ctx.where, options=ctx.options)
        if kept is not None:
            rows = _kept_rows(kept, ctx.where)
        upstream = Upstream(
            token_ids=token_ids, lse=lse, entropy=entropy, grad_logp=grad_logp, grad_entropy=grad_entropy
        )
        gradients = _Gradients(hidden, weight, bias, selected=selected, wanted=ctx.needs_input_grad[:3])
        for chunk in rows.chunks():
            gradient = _raw_gradient(rows, chunk, upstream=upstream, options=ctx.options)
            gradients.add(gradient, chunk, alone=rows.chunk_size >= rows.count)
            del gradient  # before the next chunk makes its own
        return *gradients.results(), None, None, None, None


def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    selected: Tensor | None,
    where: VocabularySlice,
    options: Options,
) -> Rows:
    dtype = statistics_dtype(hidden)
    count = len(hidden) if selected is None else len(selected)

    def make(chunk: slice) -> Tensor:
        return options.transform_(linear(_taken(hidden, selected, chunk), weight, bias).to(dtype))

    size = options.rows_at_a_time(count, where.size, dtype)
    return Rows(make=make, count=count, chunk_size=size, where=where, dtype=dtype, device=hidden.device)


def _kept_rows(kept: Tensor, where: VocabularySlice) -> Rows:
    def make(chunk: slice) -> Tensor:
        return kept[chunk].clone() if where.is_cut else kept[chunk]

    count = len(kept)
    return Rows(make=make, count=count, chunk_size=max(1, count), where=where, dtype=kept.dtype, device=kept.device)


def _taken(hidden: Tensor, selected: Tensor | None, chunk: slice) -> Tensor:
    return hidden[chunk] if selected is None else hidden.index_select(0, selected[chunk])


def _raw_gradient(rows: Rows, chunk: slice, *, upstream: Upstream, options: Options) -> Tensor:
    """Gradient of a chunk's logits as the linear layer made them."""
    x = rows.make(chunk)
    slope = options.slope(x)
    gradient = upstream.logits_gradient(x, chunk, rows.where)
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


class _Gradients:
    """Gradients of hidden, weight and bias, chunk after chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        selected: Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        self.inputs, self.selected, self.wanted = (hidden, weight, bias), selected, wanted
        self.of_hidden: Tensor | None = None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None
        if wanted[0]:
            self.of_hidden = torch.empty_like(hidden) if selected is None else torch.zeros_like(hidden)
        if wanted[2] and bias is not None:
            self.of_bias = torch.zeros_like(bias, dtype=statistics_dtype(bias))

    def add(self, gradient: Tensor, chunk: slice, *, alone: bool) -> None:
        hidden, weight, _ = self.inputs
        if self.of_bias is not None:
            self.of_bias += gradient.sum(0)
        gradient = gradient.to(weight.dtype)
        if self.of_hidden is not None and self.selected is None:
            torch.mm(gradient, weight, out=self.of_hidden[chunk])
        elif self.of_hidden is not None and self.selected is not None:
            self.of_hidden.index_copy_(0, self.selected[chunk], gradient @ weight)
        if self.wanted[1]:
            self._add_to_weight(gradient.t(), _taken(hidden, self.selected, chunk), alone=alone)

    def _add_to_weight(self, gradient: Tensor, rows: Tensor, *, alone: bool) -> None:
        if alone:
            self.of_weight = gradient @ rows
            return
        if self.of_weight is None:
            self.of_weight = torch.zeros_like(self.inputs[1], dtype=statistics_dtype(rows))
        if self.of_weight.dtype == rows.dtype:
            self.of_weight.addmm_(gradient, rows)
        else:
            self.of_weight += gradient @ rows

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        _, weight, bias = self.inputs
        if self.wanted[1] and self.of_weight is None:  # no rows
            self.of_weight = torch.zeros_like(weight)
        return (
            self.of_hidden,
            None if self.of_weight is None else self.of_weight.to(weight.dtype),
            None if self.of_bias is None or bias is None else self.of_bias.to(bias.dtype),
        )
