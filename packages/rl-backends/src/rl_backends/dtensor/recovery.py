"""FSDP2 after a pass that failed half-way: nothing gathered, no gradient kept, ready for the next one.

torch's `reset_iter_state` leaves gradients on gathered parameters, which the next pass would add to its own.
"""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["forget_pass"]


def forget_pass(model: nn.Module) -> None:
    """Clear every gradient of `model`, plain or under FSDP2, wherever a failed forward or backward has left it."""
    if isinstance(model, FSDPModule):
        state: Any = model._get_fsdp_state()  # noqa: SLF001 - no public one
        if state._is_root is not None:  # noqa: SLF001 - before the first pass there is no state of one
            model.reset_iter_state()
        model.set_requires_gradient_sync(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _forget_gathered_gradients(module)
            module.reshard()
    model.zero_grad()


def _forget_gathered_gradients(module: FSDPModule) -> None:
    state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public one
    for group in state._fsdp_param_groups:  # noqa: SLF001
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None  # noqa: SLF001
