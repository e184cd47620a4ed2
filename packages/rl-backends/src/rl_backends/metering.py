"""The meter of a backend's steps, from what backends have in common."""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from rl_backends.metrics import StepMeter, memory_by_category
from rl_backends.metrics.flops import peak_of_this_device

__all__ = ["make_meter"]

Held = tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]


@runtime_checkable
class Computing(Protocol):
    """What the configuration of every backend says of how it computes."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """In which numbers."""

    @property
    def sequence_packing(self) -> bool:
        """Rows lie one after the other, without padding."""

    @property
    def peak_flops_per_s(self) -> float | None:
        """Of one device; None looks it up."""


def make_meter(
    skeleton: nn.Module, config: Computing, *, token_multiple: int, recomputed: bool, memory_of: Callable[[], Held]
) -> StepMeter:
    """For the Hugging Face model that `skeleton` is like before it was laid over ranks.

    Args:
        skeleton: with or without weights.
        config: of the backend.
        token_multiple: what the length of rows is rounded up to.
        recomputed: whether backward computes every layer again.
        memory_of: whose memory to account for.
    """
    device = torch.device(config.device)
    return StepMeter.of(
        skeleton,
        device=device,
        num_ranks=dist.get_world_size(),
        layout="packed" if config.sequence_packing else "padded",
        token_multiple=token_multiple,
        recomputed=recomputed,
        peak_flops_per_s=config.peak_flops_per_s or peak_of_this_device(device, config.precision),
        memory=lambda: memory_by_category(*memory_of()),
    )
