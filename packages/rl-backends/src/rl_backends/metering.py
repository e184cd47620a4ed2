"""The meter of a backend's steps, from what backends have in common."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from rl_backends.metrics import StepMeter, memory_by_category
from rl_backends.metrics.hardware import peak_of_this_device

__all__ = ["make_meter"]

Held = tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]


def make_meter(
    skeleton: nn.Module,
    *,
    device: str,
    precision: Literal["float32", "bfloat16"],
    packed: bool,
    token_multiple: int,
    recomputed: bool,
    peak_flops_per_s: float | None,
    memory_of: Callable[[], Held],
) -> StepMeter:
    """For the Hugging Face model that `skeleton` is like before it was laid over ranks.

    Args:
        skeleton: with or without weights.
        device: that it computes on.
        precision: that it computes in.
        packed: rows lie one after the other, without padding.
        token_multiple: what the length of rows is rounded up to.
        recomputed: whether backward computes every layer again.
        peak_flops_per_s: of one device; None looks it up.
        memory_of: whose memory to account for.
    """
    return StepMeter.of(
        skeleton,
        device=torch.device(device),
        num_ranks=dist.get_world_size(),
        layout="packed" if packed else "padded",
        token_multiple=token_multiple,
        recomputed=recomputed,
        peak_flops_per_s=peak_flops_per_s or peak_of_this_device(torch.device(device), precision),
        memory=lambda: memory_by_category(*memory_of()),
    )
