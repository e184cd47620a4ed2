"""Where the memory of a run is: bytes of parameters, gradients, optimizer state and buffers on each device, and totals.

Counts storages, each once: ties and views are no memory of their own, and of a DTensor only this rank's part is. Does
not know activations; on a GPU they are in what the allocator says beyond the categories. Waits for no device.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backends.metrics.storages import held_storages, named_parameters, optimizer_tensors
from rl_parallel_plans.checkpoints import reshard

__all__ = ["CATEGORIES", "MemoryUse", "memory_by_category"]

CATEGORIES = ("parameters", "gradients", "optimizer state", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at one moment. Made by `memory_by_category`."""

    by_device: Mapping[str, Mapping[str, int]]
    """Of each of `CATEGORIES` on each device that holds any: {"cuda:0": {"parameters": ..., ...}}."""

    cuda: Mapping[str, int] | None
    """What torch's allocator says of the model's GPU: `allocated`, `reserved`, and their peaks since the process began
    or `torch.cuda.reset_peak_memory_stats()`; None where nothing is on a GPU."""

    resident: int | None
    """Resident memory of this process, from /proc; None where there is no /proc."""

    peak_resident: int | None
    """The most it has been since the process began."""

    def total(self, device: str | None = None) -> int:
        """Of all categories, on one device or on all."""
        chosen = self.by_device.values() if device is None else [self.by_device.get(device, {})]
        return sum(sum(categories.values()) for categories in chosen)

    def category(self, name: str) -> int:
        """Of one category on all devices."""
        return sum(categories.get(name, 0) for categories in self.by_device.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def as_json(self) -> str:
        """One line of JSON with every figure."""
        return json.dumps(self.as_dict())

    def render(self) -> str:
        """A table for people, in MiB."""
        rows = [
            (category, device, categories[category])
            for device, categories in self.by_device.items()
            for category in CATEGORIES
            if categories.get(category)
        ]
        rows += [(f"allocator: {name}", "cuda", size) for name, size in (self.cuda or {}).items()]
        rows += [("process: resident", "host", self.resident)] if self.resident is not None else []
        rows += [("process: peak", "host", self.peak_resident)] if self.peak_resident is not None else []
        return "\n".join(f"{name:<27} {device:<7} {size / 2**20:>12,.1f} MiB" for name, device, size in rows)


def memory_by_category(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> MemoryUse:
    """What `model` and `optimizers` hold on this rank now. Parameters that FSDP2 has left gathered are sharded first.

    Args:
        model: parameters, their gradients, and buffers.
        optimizers: of its parameters.
    """
    reshard(model)
    named = named_parameters(model)
    tensors: dict[str, Sequence[tuple[str, torch.Tensor]]] = {
        "parameters": named,
        "gradients": [(name, grad) for name, p in named if (grad := _gradient(p)) is not None],
        "optimizer state": list(optimizer_tensors(optimizers)),
        "buffers": list(model.named_buffers()),
    }
    seen: set[int] = set()
    by_device: dict[str, dict[str, int]] = {}
    for category in CATEGORIES:
        for held in held_storages(tensors[category], seen=seen):
            counts = by_device.setdefault(str(held.device), {})
            counts[category] = counts.get(category, 0) + held.num_bytes
    resident, peak = _resident()
    return MemoryUse(
        by_device=by_device,
        cuda=_cuda([tensor for category in ("parameters", "buffers") for _, tensor in tensors[category]]),
        resident=resident,
        peak_resident=peak,
    )


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Megatron adds gradients up in `main_grad`, a part of a buffer of its own."""
    return getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad


def _cuda(tensors: Iterable[torch.Tensor]) -> dict[str, int] | None:
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
    }


def _resident() -> tuple[int | None, int | None]:
    status = Path("/proc/self/status")
    if not status.exists():
        return None, None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak
