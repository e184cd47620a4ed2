"""The least memory that training needs, by arithmetic on the configuration, and the memory that this machine has.

In bytes per parameter:

    DTensor in float32         weights 4, gradients 4, AdamW's moments 8
    Megatron in bfloat16       weights 2, gradients 4, moments and float32 weights 12
    LoRA                       the frozen weights, their merged copy, and 16 for each parameter of an adapter

Activations, caches and working memory come on top and are not counted, so what fits may still be too large.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from rl_backends.dtensor.config import DTensorConfig
from rl_backends.lora.layers import AdapterSize
from rl_backends.megatron.config import MegatronConfig

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GRADIENT_BYTES = 4
"""Gradients are float32 in both backends."""


class LeastMemory(NamedTuple):
    """The least bytes of a trainer, summed over all its ranks."""

    element_bytes: int
    """Of one element of the weights as they are stored."""
    weight_bytes: int
    """Of the weights, in as many copies as there are."""
    trainer_bytes: int
    """Of the weights, their gradients and the optimizer's state."""


def least_memory(
    config: DTensorConfig | MegatronConfig,
    *,
    parameters: int,
    optimizers: Collection[str],
    ranks: int,
    adapters: AdapterSize | None = None,
) -> LeastMemory:
    """Calculate the least memory of training on so many `ranks`.

    parameters: elements of all weights; tied weights count once.
    optimizers: names of the optimizers that are used, one after another; nothing is trained if there are none.
    adapters: what is trained instead of the weights.
    """
    element, state = bytes_of_element(config, optimizers=optimizers)
    if isinstance(config, MegatronConfig):
        # Without the distributed optimizer every data-parallel rank has its own copy.
        copies = 1 if config.use_distributed_optimizer else max(1, ranks // config.data_multiple)
    else:
        copies = config.data_parallel_replicate_size
    state = GRADIENT_BYTES + state if optimizers else 0
    held, trained, merged = parameters * element, parameters, 0
    if adapters is not None:
        held, trained = adapters.frozen_bytes + adapters.trainable_bytes, adapters.trainable
        merged = adapters.merged_bytes
    return LeastMemory(element, held * copies, (held + trained * state + merged) * copies)


def bytes_of_element(config: DTensorConfig | MegatronConfig, *, optimizers: Collection[str]) -> tuple[int, int]:
    """Bytes of one element of the weights as they are stored, and of the optimizer's state of it."""
    if isinstance(config, MegatronConfig):
        return (2, 12) if config.precision == "bfloat16" else (4, 8)
    element = 4 if config.lora_cfg is None else config.lora_cfg.torch_base_dtype.itemsize
    return element, 8 if "adamw" in optimizers else 2


def host_bytes() -> int:
    """Return the memory of this machine, or the limit of its container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def device_bytes() -> int | None:
    """Return the memory of one GPU of this machine, or None if it has no GPU."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
