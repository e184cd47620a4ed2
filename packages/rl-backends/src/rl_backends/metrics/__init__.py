"""What a step costs and how well the machine is used: tokens, FLOPs, seconds, memory. Pure accounts; no collective."""

from rl_backends.metrics.flops import ModelFlops, peak_flops_per_s
from rl_backends.metrics.memory import MemoryUse, device_used_bytes, memory_by_category
from rl_backends.metrics.step import StepMeter, StepMetrics, StepOutcome

__all__ = [
    "MemoryUse",
    "ModelFlops",
    "StepMeter",
    "StepMetrics",
    "StepOutcome",
    "device_used_bytes",
    "memory_by_category",
    "peak_flops_per_s",
]
