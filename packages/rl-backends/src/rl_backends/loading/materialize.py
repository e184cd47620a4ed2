"""Memory for a model that was sharded on the meta device. Puts no numbers into it."""

from typing import Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.structure import retie, tied_names

__all__ = ["materialize"]


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device | str) -> nn.Module:
    """Give every meta parameter of a (sharded) model uninitialised memory on `device`; return the model.

    Buffers that are real move there with their numbers. Ties stay ties. Parameters that FSDP offloads lie in host
    memory. Optimizers and references to parameters are to be made afterwards: the parameters may be other objects.
    """
    ties = tied_names(model)
    offloaded = _offloaded(model)

    def moved(tensor: Tensor) -> Tensor:
        target = "cpu" if id(tensor) in offloaded else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    model._apply(moved)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what `to` and `to_empty` are made of; FSDP overrides it
    retie(model, ties)
    return model


def _offloaded(model: nn.Module) -> set[int]:
    """Ids of the parameters that FSDP keeps in host memory."""
    from torch.distributed.fsdp import FSDPModule

    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):  # noqa: SLF001 - no public one says which are offloaded
                found |= {id(each.sharded_param) for each in group.fsdp_params if each.offload_to_cpu}
    return found


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # noqa: SLF001 - before torch 2.12
