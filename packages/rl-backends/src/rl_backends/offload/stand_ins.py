"""What stands in a model for weights that are elsewhere: parameters on the meta device, and refusals.

Memory without bytes would be read all the same, and crash the process instead of raising an error. So whoever walks the
module (a refit, a checkpoint) finds tensors of the right names, shapes and dtypes that have no values, and whoever runs
it, or steps its optimizers, is told what to call. Takes away no memory itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Refusals", "StandIns"]

Refuse = Callable[[str], None]
"""Raises the error, given what was called."""


class StandIns:
    """In the place of every parameter of `model`, until `remove`; the very parameters are kept and come back."""

    def __init__(self, model: nn.Module) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        stand_ins: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001 - setattr would run wrappers' own code
                if parameter is None:
                    continue
                self._replaced.append((module, name, parameter))
                stand_in = stand_ins.setdefault(id(parameter), _stand_in(parameter))
                module._parameters[name] = stand_in  # noqa: SLF001 - as FSDP2 does

    def remove(self) -> None:
        """Put the parameters back."""
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter  # noqa: SLF001 - the inverse
        self._replaced.clear()


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Without values; `stands_for` is the parameter itself."""
    shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    stand_in = nn.Parameter(shape, requires_grad=False)
    stand_in.stands_for = parameter  # type: ignore[attr-defined]
    return stand_in


class Refusals:
    """Refuses forwards and state dicts of `model`, and steps of `optimizers`, until `remove`."""

    def __init__(self, model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer], refuse: Refuse) -> None:
        def forward(module: nn.Module, *_: Any) -> None:
            refuse(f"the forward of {type(module).__name__}")

        def state_dict(module: nn.Module, *_: Any) -> None:
            refuse(f"state_dict of {type(module).__name__}")

        def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            refuse(f"step of {type(optimizer).__name__}")

        self._handles: list[RemovableHandle] = [each.register_step_pre_hook(step) for each in optimizers]
        if model is not None:
            self._handles.append(model.register_state_dict_pre_hook(state_dict))  # type: ignore[no-untyped-call]
            self._handles += [
                module.register_forward_pre_hook(forward, prepend=True)  # before FSDP2's, which gathers
                for module in model.modules()
                if module is model or next(module.parameters(recurse=False), None) is not None
            ]

    def remove(self) -> None:
        """Allow everything again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
