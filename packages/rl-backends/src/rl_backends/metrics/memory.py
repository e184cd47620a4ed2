"""Where the memory of a run is: bytes of parameters, gradients, optimizer state and buffers on each device, and totals.

Each storage is counted once: ties and views have no memory of their own, and of a DTensor only this rank's part counts.
Activations are not counted; on a GPU they are in what the allocator says beyond the categories. Waits for no device.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rl_parallel_plans.checkpoints import reshard

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

    def total(self) -> int:
        """Of all categories on all devices."""
        return sum(sum(categories.values()) for categories in self.by_device.values())

    def category(self, name: str) -> int:
        """Of one category on all devices."""
        return sum(categories.get(name, 0) for categories in self.by_device.values())


def memory_by_category(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> MemoryUse:
    """What `model` and `optimizers` hold on this rank now. Parameters that FSDP2 has left gathered are sharded first.

    Args:
        model: parameters, their gradients, and buffers.
        optimizers: of its parameters.
    """
    tensors = tensors_by_category(model, optimizers)
    seen: set[int] = set()
    by_device: dict[str, dict[str, int]] = {}
    for category, named in tensors.items():
        for held in named_storages(named, seen=seen):
            counts = by_device.setdefault(str(held.device), {})
            counts[category] = counts.get(category, 0) + held.num_bytes
    cuda: dict[str, int] | None = None
    on_gpu = (tensor.device for _, tensor in (*tensors["parameters"], *tensors["buffers"]) if tensor.is_cuda)
    if (device := next(on_gpu, None)) is not None:
        cuda = {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    resident: dict[str, int] = {}
    if (status := Path("/proc/self/status")).exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        resident = {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
    return MemoryUse(
        by_device=by_device, cuda=cuda, resident=resident.get("VmRSS"), peak_resident=resident.get("VmHWM")
    )


def device_used_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that all processes together hold now; None on a CPU. The driver is asked, no kernel waited for."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


# ---- Storages, seen through DTensors, quantized optimizer states and placeholders of offloaded weights.


@dataclass(frozen=True, slots=True)
class NamedStorage:
    """A storage, and the first tensor that was found to use it."""

    name: str
    """Of the tensor, for messages."""
    storage: torch.UntypedStorage
    device: torch.device
    num_bytes: int
    """Its size when it was found."""

    @property
    def bytes(self) -> Tensor:
        """All of it as uint8 [num_bytes]; a view, not a copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


def named_storages(tensors: Iterable[tuple[str, Tensor]], *, seen: set[int] | None = None) -> Iterator[NamedStorage]:
    """Each storage under `tensors` once; those without bytes, and those on the meta device, not at all."""
    seen = set() if seen is None else seen
    for name, tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            identity = storage._cdata  # noqa: SLF001 - what torch itself tells storages apart by
            if identity not in seen and storage.nbytes() and plain.device.type != "meta":
                seen.add(identity)
                yield NamedStorage(name, storage, plain.device, storage.nbytes())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that `tensor` consists of: itself, unless it wraps others."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(inner)


def tensors_by_category(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, list[tuple[str, Tensor]]]:
    """The tensors of each of `CATEGORIES`, named for messages, of a model that is sharded first.

    A tied parameter comes once; offloaded weights as themselves, and not as their placeholders.
    """
    reshard(model)
    named = [(name, getattr(each, "offloaded_parameter", each)) for name, each in model.named_parameters()]
    # Megatron adds gradients up in `main_grad`, a part of a buffer of its own.
    gradients = [(name, grad) for name, each in named for grad in (each.grad, getattr(each, "main_grad", None))]
    own, states = {id(each) for _, each in named}, list[tuple[str, Tensor]]()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, state in enumerate(optimizer.state.values()):
            states += _inside(state, f"{kind} state {number}")
        # It may step copies of the parameters in more digits.
        stepped = (each for group in optimizer.param_groups for each in group["params"])
        states += [(f"what {kind} steps", each) for each in stepped if id(each) not in own]
    found = (
        named,
        [(f"gradient of {name}", grad) for name, grad in gradients if grad is not None],
        states,
        list(model.named_buffers()),
    )
    return dict(zip(CATEGORIES, found, strict=True))


def _inside(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _inside(each, f"{name} {key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _inside(each, name)
