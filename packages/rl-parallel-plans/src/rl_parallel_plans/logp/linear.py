"""`linear_logp`: log-probabilities from hidden states and a (vocabulary-sharded) `lm_head`, in chunks, without `[T, V]` logits.

It knows local tensors and which words they are. It gives the gradient of its own words: what has to be summed over
ranks is summed by whoever gave it `hidden`. Chunks of the weight's gradient add up in fp32: their sum in bf16 would
lose what each of them adds.

`linear_logp` makes the logits of `chunk_size` rows at a time, and again in backward, for which it saves only hidden,
weight, targets and O(N) statistics (logits of a megabyte or less are kept instead). Over a vocabulary cut on the tp
axis it does two collectives forward, and one backward for the gradient of hidden; a sequence-parallel hidden is
gathered once before, and that one collective is then a reduce-scatter.

It knows nothing of shifting: `targets[n]` is the token that row n predicts. The idea of fusing the linear layer with
the softmax is that of Cut Cross-Entropy (arXiv:2411.09009); here in plain torch, any device.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from rl_parallel_plans.logp.chunks import (
    Head,
    Options,
    Rows,
    Upstream,
    at_targets,
    local_head,
    local_hidden,
    of_top_k,
    one_dtype,
    read_targets,
    statistics_dtype,
)
from rl_parallel_plans.logp.kernels import Kernel, kernel_logp, require_kernel
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


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[False] = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> Tensor: ...


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: Literal[True],
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> tuple[Tensor, Tensor]: ...


def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    kernel: Kernel = "torch",
    tp_axis: str = "tp",
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` at the targets, differentiable.

    hidden: [..., H], fp32, bf16 or fp16, the dtype of the weight. Plain or a DTensor Replicate: the same on every rank
        of the tp axis. A DTensor Shard of a leading dim, as sequence parallelism has it: gathered once, and its
        gradient is sharded again.
    lm_head: a linear layer, its weight [V, H] and bias [V] plain tensors, or DTensors on a mesh with the one axis
        `tp_axis`, Shard(0) (V need not divide evenly) or Replicate, both alike.
    targets: [...] token ids in [0, V), or [..., K] for K words in each row, on every rank those of the whole
        vocabulary and of all rows.
    chunk_size: rows whose logits exist at one time; memory is O(chunk_size * V / tp), independent of the number of
        rows. None: an eighth of them, at least 256, at most 1024 and at most 256 MiB of logits.
    entropy: also return the entropy of each row's distribution, in nats, differentiable.
    softcap: `cap(x) = softcap * tanh(x / softcap)`, the final_logit_softcapping of Gemma 2; None for none.
    ignore_index: a row with this target (all K of them) costs nothing: its logp and entropy are 0 and its gradient is
        0, as in `F.cross_entropy`. None: every target is a word, and nothing waits for the device to count rows.
    kernel: "torch"; "liger" and "verl" hand the whole to their CUDA kernels, which take temperature and entropy alone.

    Returns logp, shaped as targets, fp32 (fp64 for fp64 inputs), plain, the same on every rank; or (logp, entropy
    [...]). Raises ValueError for shapes, dtypes and targets that do not fit, PlanError for placements, layers and
    kernels that do not.
    """
    options = Options(
        temperature=temperature, chunk_size=chunk_size, entropy=entropy, softcap=softcap, logit_scale=logit_scale
    )
    head = local_head(lm_head, tp_axis=tp_axis)
    _check_shapes(hidden, lm_head, targets)
    asked = read_targets(targets, hidden.shape[:-1], total=head.where.total, ignore_index=ignore_index)
    require_kernel(kernel, head, hidden=hidden, words=asked.token_ids.shape[1], options=options)
    by_kernel = kernel != "torch" and len(asked.token_ids) > 0
    whole = local_hidden(hidden, head.where, tp_axis=tp_axis, summed=by_kernel and kernel == "liger")
    whole, head = one_dtype(whole.flatten(0, -2), head)
    if by_kernel:
        rows = whole if asked.rows is None else whole.index_select(0, asked.rows)
        logp, entropies = kernel_logp(kernel, rows, head, token_ids=asked.token_ids, options=options)
    else:
        logp, entropies, _ = logp_of(whole, head, asked.token_ids, rows=asked.rows, options=options)
    logp = asked.spread_words(logp)
    return (logp, asked.spread_rows(entropies)) if entropies is not None else logp


def _check_shapes(hidden: Tensor, lm_head: nn.Module, targets: Tensor) -> None:
    weight = lm_head.weight
    assert isinstance(weight, torch.Tensor)
    fitting = (
        hidden.ndim > 1
        and weight.ndim == 2
        and hidden.shape[-1] == weight.shape[1]
        and targets.shape[: hidden.ndim - 1] == hidden.shape[:-1]
        and targets.ndim <= hidden.ndim
    )
    if not fitting:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, lm_head.weight {list(weight.shape)} and targets {list(targets.shape)}: "
            "they must be [..., H], [V, H] and [...], or [..., K] for K words in each row"
        )
