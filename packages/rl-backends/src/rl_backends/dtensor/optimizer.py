"""AdamW and its learning-rate schedule from an `OptimizerConfig`."""

from collections.abc import Iterable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from rl_backends.dtensor.config import OptimizerConfig

__all__ = ["learning_rate_factor", "make_optimizer"]


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, num_steps: int
) -> tuple[AdamW, LambdaLR]:
    """AdamW over `parameters`, and the schedule to advance after each of `num_steps` steps.

    Raises:
        ValueError: the warm-up is not shorter than the whole.
    """
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} must be less than the {num_steps} steps of the stage, or the learning "
            f"rate never reaches lr={config.lr}"
        )
    optimizer = AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
    return optimizer, LambdaLR(optimizer, lambda index: learning_rate_factor(index, config, num_steps=num_steps))


def learning_rate_factor(index: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """The share of `lr` that step `index` (from 0) uses: warm-up to 1, then linear decay to `final_lr_ratio`.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.0)
    >>> [learning_rate_factor(index, config, num_steps=7) for index in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if index < config.warmup_steps:
        return (index + 1) / config.warmup_steps
    progress = min(1.0, (index - config.warmup_steps) / max(1, num_steps - config.warmup_steps - 1))
    return 1.0 - (1.0 - config.final_lr_ratio) * progress
