"""The tensors of an engine's module by its own names, each memory once.

Parameters come first, then buffers, persistent or not; DTensors appear as their local tensor.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["EngineMemory", "local_tensor", "read_memory", "storage_id"]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """What a module holds."""

    tensors: dict[str, Tensor]
    """Detached, in the module's own memory; of names that share one, the first."""

    tied: dict[str, str]
    """The other names of the same memory, each with the first."""

    def moved_from(self, other: EngineMemory) -> list[str]:
        """The names whose memory is another than in `other`."""
        mine = {name: place(tensor) for name, tensor in self.tensors.items()}
        theirs = {name: place(tensor) for name, tensor in other.tensors.items()}
        return [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]


def read_memory(module: nn.Module) -> EngineMemory:
    """Every parameter and every buffer of `module` as it is now."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        local = local_tensor(tensor)
        root = first.setdefault(place(local), name) if local.numel() else name
        if root == name:
            tensors[name] = local
        else:
            tied[name] = root
    return EngineMemory(tensors, tied)


def place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory seen the same way, also on the meta device."""
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def storage_id(tensor: Tensor) -> int:
    """The same for tensors of one storage, for as long as it lives; `data_ptr` is 0 for all on the meta device."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001  as torch's own code tells storages apart
    return address


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, detached, in the same memory."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            with torch.no_grad():
                return tensor.to_local().detach()
    return tensor.detach()
