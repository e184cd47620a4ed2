"""`linear_logp`: log-probabilities from hidden states and an `lm_head`, in chunks, without the `[T, V]` logits.

`top_k_logp` finds the k most probable tokens the same way. For distillation the teacher's `top_k_logp` gives the
tokens, and the student's `logp_of_token_ids` its log-probabilities of the same ones.

It makes the logits of `chunk_size` rows at a time, and again in backward, for which it saves only hidden, weight,
targets and O(N) statistics (logits of a megabyte or less are kept instead). Over a vocabulary sharded on the tp axis it
does two collectives forward, and one backward for the gradient of hidden; a sequence-parallel hidden is gathered once
before, and that one collective is then a reduce-scatter.

Nothing is shifted: `targets[n]` is the token that row n predicts. The idea of fusing the linear layer with the softmax
is that of Cut Cross-Entropy (arXiv:2411.09009); here in plain torch, on any device.
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
    TopKLogp,
    Upstream,
    VocabularySlice,
    at_targets,
    local_head,
    local_rows,
    of_top_k,
    read_targets,
    require_k,
    top_k_of,
)
from rl_parallel_plans.logp.kernels import Kernel, kernel_logp, require_kernel

# Below this, making logits twice costs more time than keeping them costs memory: tiny models on a CPU live here.
KEPT_BYTES = 2**20


def logp_of(
    hidden: Tensor, head: Head, wanted: Tensor | int, *, rows: Tensor | None = None, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities [N, K], entropy [N] if asked for, and the token ids [N, K] where they were not given.

    hidden: [M, H]; rows: [N] indices of those that are wanted, None for all.
    wanted: token ids [N, K], or K for the K most probable tokens.
    """
    where = head.where
    if isinstance(wanted, Tensor) and where.group is None and not options.entropy:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if len(wanted) * where.size * dtype.itemsize <= KEPT_BYTES:
            inputs = hidden if rows is None else hidden.index_select(0, rows)
            return _few_logits(inputs, head, options).log_softmax(-1).gather(-1, wanted), None, None
    return _LinearLogp.apply(hidden, head.weight, head.bias, wanted, rows, where, options)  # type: ignore[no-any-return, no-untyped-call]


def _few_logits(inputs: Tensor, head: Head, options: Options) -> Tensor:
    """Logits that autograd may keep, since they are few: scaled, capped, over the temperature."""
    x = linear(inputs, head.weight, head.bias).to(torch.promote_types(inputs.dtype, torch.float32))
    if options.logit_scale != 1.0:
        x = x * options.logit_scale
    if options.softcap is not None:
        x = (x / options.softcap).tanh() * options.softcap
    return x / options.temperature if options.temperature != 1.0 else x


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
        rows, kept = _rows(hidden, weight, bias, selected=selected, kept=None, where=where, options=options), None
        if rows.count * where.size * rows.dtype.itemsize <= KEPT_BYTES:
            kept = rows.make(slice(0, rows.count))
            rows = _rows(hidden, weight, bias, selected=selected, kept=kept, where=where, options=options)
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
        options = ctx.options
        rows = _rows(hidden, weight, bias, selected=selected, kept=kept, where=ctx.where, options=options)
        upstream = Upstream(
            token_ids=token_ids, lse=lse, entropy=entropy, grad_logp=grad_logp, grad_entropy=grad_entropy
        )
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = grad_weight = grad_bias = None
        if needs_hidden:  # rows that are not selected have a gradient of 0
            grad_hidden = torch.empty_like(hidden) if selected is None else torch.zeros_like(hidden)
        if needs_weight and len(rows.chunks) != 1:
            # Chunks add up in fp32: their sum in bf16 would lose what each of them adds.
            grad_weight = torch.zeros_like(weight, dtype=rows.dtype)
        if needs_bias and bias is not None:
            grad_bias = torch.zeros_like(bias, dtype=rows.dtype)

        for chunk in rows.chunks:
            # The gradient of x, then of the logits as the linear layer made them: times dx/dlogits.
            x = rows.make(chunk)
            slope: Tensor | float = options.logit_scale / options.temperature
            if options.softcap is not None:  # taken before logits_gradient may overwrite x
                slope = (x * (options.temperature / options.softcap)).square_().neg_().add_(1.0).mul_(slope)
            gradient = upstream.logits_gradient(x, chunk, rows.where)
            if options.softcap is not None or slope != 1.0:
                gradient = gradient.mul_(slope)
            del x, slope

            # Through the linear layer.
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            if grad_hidden is not None and selected is None:
                torch.mm(gradient, weight, out=grad_hidden[chunk])
            elif grad_hidden is not None:
                grad_hidden.index_copy_(0, selected[chunk], gradient @ weight)
            if needs_weight:
                inputs = hidden[chunk] if selected is None else hidden.index_select(0, selected[chunk])
                if grad_weight is None:  # the only chunk
                    grad_weight = gradient.t() @ inputs
                elif grad_weight.dtype == inputs.dtype:
                    grad_weight.addmm_(gradient.t(), inputs)
                else:
                    grad_weight += gradient.t() @ inputs
                del inputs
            del gradient  # before the next chunk makes its own

        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None, None),
        )


def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    selected: Tensor | None,
    kept: Tensor | None,
    where: VocabularySlice,
    options: Options,
) -> Rows:
    """The rows of hidden times weight, scaled and capped; `kept`, where they are small enough to exist all at once."""
    count = len(hidden) if selected is None else len(selected)
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    def make(chunk: slice) -> Tensor:
        if kept is not None:
            return kept[chunk] if where.group is None else kept[chunk].clone()
        inputs = hidden[chunk] if selected is None else hidden.index_select(0, selected[chunk])
        x = linear(inputs, weight, bias).to(dtype)
        if options.logit_scale != 1.0:
            x = x.mul_(options.logit_scale)
        if options.softcap is not None:
            x = x.div_(options.softcap).tanh_().mul_(options.softcap)
        return x.div_(options.temperature) if options.temperature != 1.0 else x

    if kept is None:
        chunks = options.chunks(count, where.size, dtype)
    else:
        chunks = [slice(0, count)] if count else []
    return Rows(make=make, count=count, chunks=chunks, where=where, dtype=dtype, device=hidden.device)


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module | Tensor,
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
    lm_head: nn.Module | Tensor,
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
    lm_head: nn.Module | Tensor,
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
    lm_head: a linear layer, or its weight alone where there is no bias (a tied embedding, say). Weight [V, H] and bias
        [V] are plain tensors, or DTensors on a mesh with the one axis `tp_axis`, Shard(0) (V need not divide evenly) or
        Replicate, both alike.
    targets: [...] token ids in [0, V), or [..., K] for K tokens in each row, on every rank those of the whole
        vocabulary and of all rows.
    chunk_size: rows whose logits exist at one time; memory is O(chunk_size * V / tp), independent of the number of
        rows. None: an eighth of them, at least 256, at most 1024 and at most 256 MiB of logits.
    entropy: also return the entropy of each row's distribution, in nats, differentiable.
    softcap: `cap(x) = softcap * tanh(x / softcap)`, the final_logit_softcapping of Gemma 2; None for none.
    ignore_index: a row with this target (all K of them) costs nothing: its logp and entropy are 0 and its gradient is
        0, as in `F.cross_entropy`. None: every target is a token, and nothing waits for the device to count rows.
    kernel: "torch"; "liger" and "verl" hand the whole to their CUDA kernels, which take temperature and entropy alone.

    Returns logp, shaped as targets, fp32 (fp64 for fp64 inputs), plain, the same on every rank; or (logp, entropy
    [...]). Raises ValueError for shapes, dtypes and targets that do not fit, PlanError for placements, layers and
    kernels that do not.
    """
    options = Options(
        temperature=temperature, chunk_size=chunk_size, entropy=entropy, softcap=softcap, logit_scale=logit_scale
    )
    head = local_head(lm_head, tp_axis=tp_axis)
    weight = lm_head if isinstance(lm_head, Tensor) else lm_head.weight
    assert isinstance(weight, Tensor)
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
    asked = read_targets(targets, hidden.shape[:-1], total=head.where.total, ignore_index=ignore_index)
    if kernel != "torch":
        require_kernel(kernel, head, hidden=hidden, words=asked.token_ids.shape[1], options=options)
    by_kernel = kernel != "torch" and len(asked.token_ids) > 0
    rows, head = local_rows(hidden, head, tp_axis=tp_axis, summed=by_kernel and kernel == "liger")
    if by_kernel:
        rows = rows if asked.rows is None else rows.index_select(0, asked.rows)
        logp, entropies = kernel_logp(kernel, rows, head, token_ids=asked.token_ids, options=options)
    else:
        logp, entropies, _ = logp_of(rows, head, asked.token_ids, rows=asked.rows, options=options)
    logp = asked.spread_targets(logp)
    return (logp, asked.spread_rows(entropies)) if entropies is not None else logp


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
    """The k largest of `log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` and their tokens.

    hidden: [..., H], as `linear_logp` takes it, also sequence-parallel; the other arguments are those of `linear_logp`.
    The gradient is that of the log-probabilities; which tokens they belong to is taken as given.
    Raises as `linear_logp` does, and ValueError for a k outside [1, V].
    """
    options = Options(temperature=temperature, chunk_size=chunk_size, softcap=softcap, logit_scale=logit_scale)
    head = local_head(lm_head, tp_axis=tp_axis)
    if hidden.ndim < 2 or head.weight.ndim != 2 or hidden.shape[-1] != head.weight.shape[1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and lm_head.weight {[head.where.total, *head.weight.shape[1:]]}: "
            "they must be [..., H] and [V, H]"
        )
    require_k(k, head.where.total)
    leading = hidden.shape[:-1]
    rows, head = local_rows(hidden, head, tp_axis=tp_axis, summed=False)
    logp, _, token_ids = logp_of(rows, head, k, options=options)
    return top_k_of(logp, token_ids, leading)


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
    """`log_softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)` at K tokens of each row.

    hidden: [..., H], as `linear_logp` takes it, also sequence-parallel; the other arguments are those of `linear_logp`.
    token_ids: [..., K] int64 or int32 in [0, V), the same on every rank; a token may be asked for twice.

    Returns logp [..., K], fp32 (fp64 for fp64 inputs), differentiable, plain, the same on every rank; normalised over
    the whole vocabulary, not over the K tokens. Raises as `linear_logp` does, and ValueError for a K of 0.
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
