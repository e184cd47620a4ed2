"""The meter of a backend's steps, made from its configuration."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.metrics import StepMeter, memory_by_category
from rl_backends.metrics.hardware import peak_of_this_device

__all__ = ["make_meter"]

Held = tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]


def make_meter(skeleton: nn.Module, sharded: ShardedModel, *, memory_of: Callable[[], Held]) -> StepMeter:
    """For the model that `skeleton` is like before it was sharded; `memory_of` tells whose memory to account for."""
    config = sharded.config
    return StepMeter.of(
        skeleton,
        device=torch.device(config.device),
        num_ranks=dist.get_world_size(),
        layout="packed" if config.sequence_packing else "padded",
        token_multiple=sharded.token_multiple,
        recomputed=config.activation_checkpointing == "full",
        peak_flops_per_s=config.peak_flops_per_s or peak_of_this_device(torch.device(config.device), config.precision),
        memory=lambda: memory_by_category(*memory_of()),
    )
