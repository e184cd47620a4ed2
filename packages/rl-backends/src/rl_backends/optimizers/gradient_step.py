"""One step along the gradient that lies on the parameters: its norm, clipping, the update; or nothing at all.

Knows gradients and optimizers; does not know what the loss was or what a batch is.
"""

from dataclasses import dataclass

from torch import nn

from rl_backends.errors import NonFiniteGradientError
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.nonfinite import agree_that_finite, nonfinite_gradients
from rl_backends.optimizers.optimizers import Optimizers
from rl_parallel_plans import clip_grad_by_total_norm_, get_grad_norm
from rl_parallel_plans.export import reshard

__all__ = ["GradientStep", "clip_and_step"]

NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """What one step did."""

    norm: float
    """Global 2-norm of the gradient before clipping; not finite where the step was skipped."""
    clipped: bool
    """Whether the gradient was scaled down to `max_grad_norm`."""
    skipped: bool
    """Whether nothing was updated because the gradient was not finite."""
    nonfinite: tuple[str, ...] = ()
    """The first five parameters whose gradient was not finite; none where only the norm overflowed."""


def clip_and_step(model: nn.Module, optimizers: Optimizers, config: OptimizerConfig, *, version: int) -> GradientStep:
    """Clip the gradient by its global norm, update the weights, clear the gradient.

    version: steps that the weights have seen, for the message. Every rank must call, and all do the same. Waits for
        the device once.

    Raises:
        NonFiniteGradientError: the norm is not finite on some rank and `on_nonfinite_gradient` is "raise". Weights and
            optimizers are as they were, and the gradient is cleared.
        RuntimeError: there is no gradient.
    """
    reshard(model)  # what a forward without a backward has left gathered would outlive this step
    parameters = optimizers.named_parameters
    if all(each.grad is None for each in parameters.values()):
        raise RuntimeError("there is no gradient to step along; call forward_backward(examples, loss) first")
    total = get_grad_norm(parameters.values())
    norm, finite = agree_that_finite(total, parameters.values())
    if not finite:
        return _leave_out(optimizers, config, norm=norm, version=version)
    clipped = config.max_grad_norm is not None and norm > config.max_grad_norm
    if config.max_grad_norm is not None:
        clip_grad_by_total_norm_(parameters.values(), config.max_grad_norm, total)
    optimizers.step()
    optimizers.zero_grad()
    return GradientStep(norm=norm, clipped=clipped, skipped=False)


def _leave_out(optimizers: Optimizers, config: OptimizerConfig, *, norm: float, version: int) -> GradientStep:
    names = nonfinite_gradients(optimizers.named_parameters)
    optimizers.zero_grad()
    if config.on_nonfinite_gradient == "raise":
        raise NonFiniteGradientError(
            f"the gradient norm of step {version + 1} is {norm}: the loss has a NaN or an overflow{_listed(names)}. "
            f"The weights are as they were after step {version}; look at the rewards and the learning rate"
        )
    optimizers.num_steps_skipped += 1
    return GradientStep(norm=norm, clipped=False, skipped=True, nonfinite=names[:NAMED])


def _listed(names: tuple[str, ...]) -> str:
    if not names:
        return ", in the norm alone and in no parameter"
    return f", in {len(names)} parameters ({', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''})"
