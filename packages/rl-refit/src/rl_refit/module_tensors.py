"""The tensors of an `nn.Module` as both sides of a refit see them: every parameter and every buffer, persistent or not.

Knows no transaction. DTensors appear as their local tensor, without a gather; names that share memory are ties.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Layout, this_rank
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["ModuleTensors", "Rename", "local_part", "named_tensors", "read_module"]

Rename = Callable[[str], str]
"""From the module's own name of a tensor to its Hugging Face name."""


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """A module's tensors at one moment."""

    local: dict[str, Tensor]
    """This rank's part of each tensor, detached, in the module's own memory."""

    metas: tuple[TensorMeta, ...]
    """The same tensors' descriptions, in the same order."""

    def manifest(self, previous: Manifest | None) -> Manifest:
        """The manifest; the very `previous` one where nothing changed, so that its hash is not computed again."""
        return previous if previous is not None and previous.tensors == self.metas else Manifest(self.metas)


def read_module(module: nn.Module, rename: Rename | None = None) -> ModuleTensors:
    """Describe the parameters, then the buffers, of `module`, in its own order.

    Raises:
        RefitError: Two tensors get the same name, a tensor has no memory (meta device), or a placement is not known.
    """
    tensors = named_tensors(module, rename)
    local = {name: local_part(tensor) for name, tensor in tensors.items()}
    whole = Layout.whole(this_rank())
    metas: list[TensorMeta] = []
    roots: dict[object, str] = {}
    for name, tensor in tensors.items():
        root = roots.setdefault(_memory(local[name]), name)
        metas.append(
            TensorMeta(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                layout=Layout.from_tensor(tensor) if _is_dtensor(tensor) else whole,
                tied_to=None if root == name else root,
            )
        )
    return ModuleTensors(local, tuple(metas))


def named_tensors(module: nn.Module, rename: Rename | None = None) -> dict[str, Tensor]:
    """The parameters, then the buffers, of `module` under their Hugging Face names, as they are.

    Raises:
        RefitError: Two tensors get the same name, or a tensor has no memory (meta device).
    """
    _reshard(module)
    tensors: dict[str, Tensor] = {}
    for own_name, tensor in itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        name = rename(own_name) if rename else own_name
        if name in tensors:
            raise RefitError(f"two tensors are named {name!r}, one of them {own_name!r} in the module", tensor=name)
        if tensor.is_meta:
            raise RefitError(f"{name!r} is on the meta device and has no values; load weights first", tensor=name)
        tensors[name] = tensor
    return tensors


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, detached, in the same memory."""
    if _is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.detach()


def _is_dtensor(tensor: Tensor) -> bool:
    if "torch.distributed.tensor" not in sys.modules:  # then there is none, and importing it would take a second
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _memory(tensor: Tensor) -> object:
    """Equal for tensors that are the same memory seen the same way; tensors without elements share nothing."""
    if tensor.numel() == 0:
        return object()
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _reshard(module: nn.Module) -> None:
    """Have FSDP2 put its sharded parameters back.

    After a forward without backward the root keeps the gathered ones in their place, which are a copy, in the compute
    dtype, and not what the optimizer updates.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
