"""One step along what forward_backward has summed up: ranks' gradients together, their norm, clipping, the update.

Or nothing at all, on every rank. Knows gradients and Megatron's optimizer; does not know what the loss was or what a
batch is. What is asked of all ranks is asked of all at once, because a rank that went on alone would wait for ever.
"""

import json
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.errors import NonFiniteGradientError
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.optimizer import MegatronOptimizers
from rl_backends.optimizers import GradientStep
from rl_backends.rank_agreement import gather_text

__all__ = ["clip_and_step"]

NAMED = 5


@torch.no_grad()
def clip_and_step(
    ddp: nn.Module, optimizers: MegatronOptimizers, *, version: int, names: Mapping[str, str] | None = None
) -> GradientStep:
    """Sum the gradients of all ranks, clip by the global norm, update the weights, clear the gradients.

    version: steps that the weights have seen, for the message.
    names: what messages call this rank's parameters, by Megatron's names; one that is not in it keeps its own.

    Every rank must call, after the same calls of forward_backward, and all do and return the same.

    Raises:
        NonFiniteGradientError: a gradient is not finite on some rank and `on_nonfinite_gradient` is "raise". Weights
            and optimizers are as they were, and the gradients are cleared.
    """
    from megatron.core.distributed import finalize_model_grads

    with cpu_compat():
        finalize_model_grads([ddp], None)
        optimizers.inner.prepare_grads()
        norm = _agree_on_norm(optimizers, next(ddp.parameters()).device)
        if not math.isfinite(norm):
            return _leave_out(optimizers, norm=norm, version=version, names=names or {})
        clipped = _clip(optimizers, norm)
        optimizers.step()
        if ddp.ddp_config.overlap_param_gather:  # type: ignore[union-attr]
            for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]:  # type: ignore[misc]
                group.param_gather_dispatched = False  # whatever was gathered since the gradients were summed
        optimizers.zero_grad()
        return GradientStep(norm=norm, clipped=clipped, skipped=False)


def _agree_on_norm(optimizers: MegatronOptimizers, device: torch.device) -> float:
    """The global norm, the same on every rank; not finite where any gradient of any rank is not.

    Replicas of a model have each reduced it, and each leaves out copies of a parameter but the first: a fault in one
    replica or copy would have the ranks' weights part.
    """
    norm = optimizers.inner.get_grad_norm()
    no_number = math.isnan(norm) or not _finite_outside_the_norm(optimizers)
    finite = norm if math.isfinite(norm) else 0.0
    told = torch.tensor([finite, no_number, math.isinf(norm)], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    agreed, no_number_anywhere, infinite_anywhere = told.tolist()
    return math.nan if no_number_anywhere else math.inf if infinite_anywhere else agreed


def _finite_outside_the_norm(optimizers: MegatronOptimizers) -> bool:
    counted = {id(grad) for part in optimizers.parts for grad in part.get_main_grads_for_grad_norm()}
    others = [grad for grad in _gradients(optimizers) if id(grad) not in counted]
    return not others or bool(nn.utils.get_total_norm(others).isfinite())


def _gradients(optimizers: MegatronOptimizers) -> list[Tensor]:
    return [each.grad for part in optimizers.parts for each in part.get_parameters() if each.grad is not None]


def _clip(optimizers: MegatronOptimizers, norm: float) -> bool:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    max_norm = optimizers.adam.max_grad_norm
    if max_norm is None:
        return False
    for part in optimizers.parts:
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
    return norm > max_norm


def _leave_out(optimizers: MegatronOptimizers, *, norm: float, version: int, names: Mapping[str, str]) -> GradientStep:
    found = _nonfinite_gradients(optimizers, names)
    optimizers.zero_grad()
    if optimizers.adam.on_nonfinite_gradient == "raise":
        raise NonFiniteGradientError(
            f"the gradient norm of step {version + 1} is {norm}: the loss has a NaN or an overflow{_listed(found)}. "
            f"The weights are as they were after step {version}; look at the rewards and the learning rate"
        )
    optimizers.num_steps_skipped += 1
    return GradientStep(norm=norm, clipped=False, skipped=True, nonfinite=found[:NAMED])


def _nonfinite_gradients(optimizers: MegatronOptimizers, names: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the parameters whose gradient has a NaN or an infinity on any rank; the same on every rank."""
    own = [
        names.get(name, name)
        for name, parameter in optimizers.named_parameters.items()
        if not torch.isfinite(parameter.main_grad).all()  # type: ignore[attr-defined] # Megatron's DDP hangs it there
    ]
    return tuple(dict.fromkeys(name for text in gather_text(json.dumps(own)) for name in json.loads(text)))


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return ", in the norm alone and in no parameter"
    return f", in {len(names)} parameters ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"
