"""The one door to torchao: AdamW whose moments take 8 bits (arXiv:2110.02861). Needs `rl-backends[8bit]`.

Moments of a local shard are quantized in blocks of 256; a shard of fewer than 4096 elements, or of a number that 256
does not divide, keeps them in full. torchao compiles its step with torch.compile, once for each shape.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["BLOCK_SIZE", "is_quantized", "make_adamw_8bit"]

BLOCK_SIZE = 256
SMALLEST = 4096


def make_adamw_8bit(
    groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW8bit of torchao over parameter groups, plain or DTensors.

    Raises:
        ImportError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            f"the optimizer 'adamw_8bit' is torchao's, which cannot be imported here ({error}): "
            "pip install 'rl-backends[8bit]'"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(
        [dict(group) for group in groups], lr=lr, betas=betas, eps=eps, block_size=BLOCK_SIZE
    )
    return optimizer


def is_quantized(num_elements: int) -> bool:
    """Whether the moments of a shard of so many elements are kept in 8 bits."""
    return num_elements >= SMALLEST and num_elements % BLOCK_SIZE == 0
