"""What an optimizer was made of, in words and bytes: which parameters, decaying or not, and the state they will need.

Bytes are computed from shapes, since the state itself comes with the first step.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.groups import ParameterGroup
from rl_parallel_plans import to_local_if_dtensor

__all__ = ["BLOCK_SIZE", "explain_optimizers", "explain_schedule", "is_quantized", "state_bytes"]

BLOCK_SIZE = 256
"""Elements that share a scale, where moments take 8 bits."""
SMALLEST_QUANTIZED = 4096
STEP_BYTES = 4
QUANTIZATION_MAP_BYTES = 256 * 4
NAMES = {"adamw": "AdamW", "adamw_8bit": "AdamW in 8 bits", "muon": "Muon"}


def state_bytes(group: ParameterGroup, config: OptimizerConfig) -> int:
    """Bytes of optimizer state that this rank will hold for a group."""
    return sum(_state_bytes(to_local_if_dtensor(each), group, config) for each in group.parameters)


def is_quantized(num_elements: int) -> bool:
    """Whether torchao keeps the moments of a shard of so many elements in 8 bits."""
    return num_elements >= SMALLEST_QUANTIZED and num_elements % BLOCK_SIZE == 0


def explain_optimizers(groups: Sequence[ParameterGroup], config: OptimizerConfig, *, num_steps: int) -> str:
    """The optimizer, its schedule, and a line for each group."""
    implementation = f" ({config.implementation})" if config.name == "adamw" else ""
    lines = [f"{NAMES[config.name]}{implementation}, lr={config.lr}, {explain_schedule(config, num_steps=num_steps)}"]
    rows = [["trained by", "weight decay", "parameters", "elements", "state on this rank", "such as"]]
    rows += [_row(group, config) for group in groups]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def explain_schedule(config: OptimizerConfig, *, num_steps: int) -> str:
    """The learning rate of `num_steps` steps, from warm-up to end."""
    parts = [f"{config.warmup_steps} steps of warm-up"] if config.warmup_steps else []
    if config.schedule == "constant" or config.final_lr_ratio == 1.0:
        parts.append("constant")
    elif config.schedule == "wsd":
        parts.append(f"stable, over the last {config.decay_steps} steps down to {config.lr * config.final_lr_ratio:g}")
    else:
        parts.append(f"{config.schedule} to {config.lr * config.final_lr_ratio:g}")
    return f"{', then '.join(parts)}, {num_steps} steps in all"


def _state_bytes(local: Tensor, group: ParameterGroup, config: OptimizerConfig) -> int:
    whole = local.numel() * local.element_size()
    if group.trained_by == "muon":
        return whole
    if config.name == "adamw_8bit" and is_quantized(local.numel()):
        scales = local.numel() // BLOCK_SIZE * 4
        return 2 * (local.numel() + scales + QUANTIZATION_MAP_BYTES) + STEP_BYTES
    return 2 * whole + STEP_BYTES


def _row(group: ParameterGroup, config: OptimizerConfig) -> list[str]:
    return [
        "Muon" if group.trained_by == "muon" else NAMES["adamw_8bit" if config.name == "adamw_8bit" else "adamw"],
        f"{config.weight_decay:g}" if group.decays else "none",
        f"{len(group.names):,}",
        f"{sum(math.prod(each.shape) for each in group.parameters):,}",
        f"{state_bytes(group, config):,} bytes",
        group.names[0],
    ]
