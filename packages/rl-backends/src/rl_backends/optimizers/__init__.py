"""Optimizers, schedules and the gradient step. Knows parameters and their shards; does not know losses or batches."""

from rl_backends.optimizers.config import MuonConfig, OptimizerConfig
from rl_backends.optimizers.gradient_step import GradientStep, clip_and_step
from rl_backends.optimizers.optimizers import Optimizers, make_optimizers
from rl_backends.optimizers.schedules import learning_rate_factor

__all__ = [
    "GradientStep",
    "MuonConfig",
    "OptimizerConfig",
    "Optimizers",
    "clip_and_step",
    "learning_rate_factor",
    "make_optimizers",
]
