"""The learning rate of each step as a share of its peak. Pure functions of the step's number; knows no optimizer.

With w warm-up steps, n steps, r = final_lr_ratio and p = (i - w) / (n - w - 1), which is 1 at the last step n - 1:

    warm-up    (i + 1) / w
    linear     1 - (1 - r) p
    cosine     r + (1 - r) (1 + cos(pi p)) / 2            arXiv:1608.03983
    wsd        1, and 1 - (1 - r) k / d at the k-th of the last d = decay_steps steps    arXiv:2404.06395

Steps after the last keep its share.
"""

import math

from rl_backends.optimizers.config import OptimizerConfig

__all__ = ["check_schedule", "learning_rate_factor"]


def check_schedule(config: OptimizerConfig, *, num_steps: int) -> None:
    """ValueError where `num_steps` leave no room for what the schedule does."""
    if config.warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} must be less than the {num_steps} steps of the stage, or the learning "
            f"rate never reaches lr={config.lr}"
        )
    decay_steps = config.decay_steps or 0
    if config.warmup_steps + decay_steps > num_steps:
        raise ValueError(
            f"warmup_steps={config.warmup_steps} and decay_steps={decay_steps} together must be at most the "
            f"{num_steps} steps of the stage, or the learning rate goes down before it is up"
        )


def learning_rate_factor(index: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """The share of `lr` that step `index` (from 0) of `num_steps` uses.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.0)
    >>> [learning_rate_factor(index, config, num_steps=7) for index in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    >>> config = OptimizerConfig(lr=1.0, schedule="wsd", decay_steps=2, final_lr_ratio=0.0)
    >>> [learning_rate_factor(index, config, num_steps=5) for index in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if index < config.warmup_steps:
        return (index + 1) / config.warmup_steps
    progress = min(1.0, (index - config.warmup_steps) / max(1, num_steps - config.warmup_steps - 1))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - config.final_lr_ratio) * progress
        case "cosine":
            return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
        case "wsd":
            return 1.0 - (1.0 - config.final_lr_ratio) * _decayed(index, config, num_steps=num_steps)


def _decayed(index: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """How far the last `decay_steps` steps have come: 0 before them, 1 at the last."""
    decay_steps = config.decay_steps or 1
    return min(1.0, max(0, index - (num_steps - decay_steps) + 1) / decay_steps)
