"""Optimizers, schedules and the gradient step."""

from rl_backends.optimizers.config import MuonConfig, OptimizerConfig
from rl_backends.optimizers.optimizers import (
    GradientStep,
    Optimizers,
    clip_and_step,
    learning_rate_factor,
    make_optimizers,
)

__all__ = [
    "GradientStep",
    "MuonConfig",
    "OptimizerConfig",
    "Optimizers",
    "clip_and_step",
    "learning_rate_factor",
    "make_optimizers",
]
