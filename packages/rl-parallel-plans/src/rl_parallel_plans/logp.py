"""Log-probabilities of tokens from hidden states and an lm_head, or from logits, without all logits at once.

`linear_logp` never holds [N, V]: it makes the logits of `chunk_size` rows at a time, and again in backward, for which
it saves only hidden, weight, targets and O(N) statistics (logits of a megabyte or less are kept instead). Over a
vocabulary cut on the tp axis it does two collectives forward, and one backward for the gradient of hidden.

It knows nothing of shifting: `targets[n]` is the token that row n predicts. The idea of fusing the linear layer with
the softmax is that of Cut Cross-Entropy (arXiv:2411.09009); here in plain torch, any device.
"""

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.vocabulary import (
    Rows,
    TargetStatistics,
    VocabularySlice,
    check_targets,
    chunks,
    entropy_gradient,
    local_slice,
    logits_gradient,
    target_statistics,
)

# Below this, making logits twice costs more time than keeping them costs memory: tiny models on a CPU live here.
KEPT_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    temperature: float
    chunk_size: int
    entropy: bool
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size}: it must be at least 1 row")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}: it must be above 0, or None")


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: Literal[False] = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_axis: str = "tp",
) -> Tensor: ...


@overload
def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: Literal[True],
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_axis: str = "tp",
) -> tuple[Tensor, Tensor]: ...


def linear_logp(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_axis: str = "tp",
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_softmax(cap(logit_scale * hidden @ weight.T) / temperature)[n, targets[n]]`, differentiable.

    hidden: [N, H], the same on every rank of the tp axis; fp32, bf16 or fp16, the dtype of the weight.
    lm_head: a linear layer without bias whose weight [V, H] is a plain tensor, or a DTensor on a mesh with the one
        axis `tp_axis`, Shard(0) (V need not divide evenly) or Replicate.
    targets: [N] token ids in [0, V), on every rank those of the whole vocabulary.
    chunk_size: rows whose logits exist at one time; memory is O(chunk_size * V / tp), independent of N.
    entropy: also return the entropy of each row's distribution, in nats, differentiable.
    softcap: `cap(x) = softcap * tanh(x / softcap)`, the final_logit_softcapping of Gemma 2; None for none.

    Returns logp [N] fp32 (fp64 for fp64 inputs), or (logp, entropy).
    Raises ValueError for shapes, dtypes and targets that do not fit, PlanError for a bias or another placement.
    """
    options = _Options(
        temperature=temperature, chunk_size=chunk_size, entropy=entropy, softcap=softcap, logit_scale=logit_scale
    )
    if getattr(lm_head, "bias", None) is not None:
        raise PlanError(
            "the lm_head has a bias, which linear_logp does not add: make the logits and call "
            "get_logprobs_from_vocab_parallel_logits"
        )
    weight, where = local_slice(lm_head.weight, dim=0, tp_axis=tp_axis, what="lm_head.weight")  # type: ignore[arg-type]
    if is_dtensor(hidden):
        if not all(placement.is_replicate() for placement in hidden.placements):
            raise PlanError(f"hidden is placed {hidden.placements}: gather it first, it must be the same on every rank")
        hidden = hidden.to_local()
    _check_shapes(hidden, weight, targets)
    check_targets(targets, where.total)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # the backward runs outside of autocast and must see the same dtypes
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and lm_head.weight is {weight.dtype}: cast one of them")
    logp, entropies = _LinearLogp.apply(hidden, weight, targets.long(), where, options)  # type: ignore[no-untyped-call]
    return (logp, entropies) if entropy else logp


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, lm_head.weight {list(weight.shape)} and targets {list(targets.shape)}: "
            "they must be [N, H], [V, H] and [N]"
        )


class _LinearLogp(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        where: VocabularySlice,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        rows, kept, chunk_size = _rows(hidden, weight, options), None, options.chunk_size
        if len(hidden) * len(weight) * _statistics_dtype(hidden).itemsize <= KEPT_BYTES:
            kept = rows(slice(None))
            rows, chunk_size = kept.__getitem__, max(1, len(hidden))
        found = target_statistics(
            rows,
            targets,
            where=where,
            chunk_size=chunk_size,
            entropy=options.entropy,
            dtype=_statistics_dtype(hidden),
        )
        ctx.save_for_backward(hidden, weight, targets, kept, found.lse, found.entropy)
        ctx.where, ctx.options, ctx.chunk_size = where, options, chunk_size
        return found.logp, found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logp: Tensor,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, kept, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        options = ctx.options
        rows = _rows(hidden, weight, options) if kept is None else kept.__getitem__
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Chunks add up in fp32: their sum in bf16 would lose what each of them adds.
        grad_weight = torch.zeros_like(weight, dtype=_statistics_dtype(hidden)) if wants_weight else None
        for chunk in chunks(len(hidden), ctx.chunk_size):
            gradient = _chunk_gradient(
                rows(chunk),
                chunk,
                where=ctx.where,
                options=options,
                saved=(targets, lse, entropy),
                grads=(grad_logp, grad_entropy),
            ).to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.t(), hidden[chunk])
            del gradient  # before the next chunk makes its own
        if grad_hidden is not None and ctx.where.group is not None:
            torch.distributed.all_reduce(grad_hidden, group=ctx.where.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows(hidden: Tensor, weight: Tensor, options: _Options) -> Rows:
    def rows(chunk: slice) -> Tensor:
        x = (hidden[chunk] @ weight.t()).to(_statistics_dtype(hidden))
        if options.logit_scale != 1.0:
            x = x.mul_(options.logit_scale)
        if options.softcap is not None:
            x = x.div_(options.softcap).tanh_().mul_(options.softcap)
        return x.div_(options.temperature) if options.temperature != 1.0 else x

    return rows


def _chunk_gradient(
    x: Tensor,
    chunk: slice,
    *,
    where: VocabularySlice,
    options: _Options,
    saved: tuple[Tensor, Tensor | None, Tensor | None],
    grads: tuple[Tensor, Tensor | None],
) -> Tensor:
    """Gradient with respect to the chunk's logits as they were before scale, cap and temperature made `x` of them."""
    (targets, lse, entropy), (grad_logp, grad_entropy) = saved, grads
    lse_of_chunk = None if lse is None else lse[chunk]
    owned = (targets[chunk], None) if where.group is None else where.owned(targets[chunk])
    gradient = logits_gradient(x, lse_of_chunk, targets=owned, grad_logp=grad_logp[chunk])
    if entropy is not None and grad_entropy is not None:
        gradient += entropy_gradient(x, lse_of_chunk, entropy=entropy[chunk], grad_entropy=grad_entropy[chunk])
    if options.softcap is not None:
        gradient = gradient.mul_(1 - (x * (options.temperature / options.softcap)).square_())
    factor = options.logit_scale / options.temperature
    return gradient.mul_(factor) if factor != 1.0 else gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@overload
def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: Literal[False] = False,
    tp_axis: str = "tp",
) -> Tensor: ...


@overload
def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: Literal[True],
    tp_axis: str = "tp",
) -> tuple[Tensor, Tensor]: ...


def get_logprobs_from_vocab_parallel_logits(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    entropy: bool = False,
    tp_axis: str = "tp",
) -> Tensor | tuple[Tensor, Tensor]:
    """`log_softmax(logits / temperature)` at `target`, differentiable, for logits that exist already.

    logits: [..., V] plain, or a DTensor Shard(-1) (V need not divide evenly) or Replicate on a mesh with the one axis
        `tp_axis`: what a plan's lm_head returns. Kept for backward as they are, never gathered, never copied whole.
    target: [...] token ids in [0, V); nothing is shifted.

    Returns logp [...] fp32 (fp64 for fp64 logits), or (logp, entropy). Raises as `linear_logp` does.
    """
    options = _Options(temperature=temperature, chunk_size=chunk_size, entropy=entropy)
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"logits are {list(logits.shape)} and target {list(target.shape)}: [..., V] and [...]")
    local, where = local_slice(logits, dim=-1, tp_axis=tp_axis, what="logits")
    check_targets(target, where.total)
    flat = local.reshape(target.numel(), where.size)
    logp, entropies = _LogitsLogp.apply(flat, target.reshape(-1).long(), where, options)  # type: ignore[no-untyped-call]
    logp = logp.view(target.shape)
    return (logp, entropies.view(target.shape)) if entropy else logp


class _LogitsLogp(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        where: VocabularySlice,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        found: TargetStatistics = target_statistics(
            _scaled(logits, options),
            targets,
            where=where,
            chunk_size=options.chunk_size,
            entropy=options.entropy,
            dtype=_statistics_dtype(logits),
        )
        ctx.save_for_backward(logits, targets, found.lse, found.entropy)
        ctx.where, ctx.options = where, options
        return found.logp, found.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logp: Tensor,
        grad_entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        logits, *saved = ctx.saved_tensors
        rows, gradient = _scaled(logits, ctx.options), torch.empty_like(logits)
        for chunk in chunks(len(logits), ctx.options.chunk_size):
            gradient[chunk] = _chunk_gradient(
                rows(chunk),
                chunk,
                where=ctx.where,
                options=ctx.options,
                saved=tuple(saved),
                grads=(grad_logp, grad_entropy),
            )
        return gradient, None, None, None


def _scaled(logits: Tensor, options: _Options) -> Rows:
    def rows(chunk: slice) -> Tensor:
        x = logits[chunk].to(_statistics_dtype(logits))
        return x / options.temperature if options.temperature != 1.0 else x  # never in place: x may be the caller's

    return rows
