"""Models without their weights: parameters on the meta device, everything that is computed from the configuration real.

A Hugging Face model computes some buffers (rotary frequencies) when it is made, and no file holds them. So it is made
here on the CPU, only that the memory of parameters is never there. Reads no files.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rl_backends.errors import ModelError

__all__ = ["in_float32", "make_skeleton", "original_class", "twin_of"]


class _EmptyOnMeta(TorchFunctionMode):
    """Memory without numbers is not taken: what a parameter is made of, and what a computed buffer is not."""

    def __torch_function__(
        self, function: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def make_skeleton(make: Callable[[], nn.Module]) -> nn.Module:
    """What `make` makes, in eval mode, its ties made, its parameters on the meta device and its buffers real.

    Consumes no random numbers.

    Raises:
        ModelError: a buffer that no file holds has no numbers.
    """
    with torch.random.fork_rng(devices=[]), _EmptyOnMeta():
        model = make()
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in moved:
                moved[id(parameter)] = _on_meta(parameter)
            module.register_parameter(name, moved[id(parameter)])
    tie: Callable[[], None] | None = getattr(model, "tie_weights", None)
    if tie is not None:  # code that comes with a model need not have it
        tie()
    _require_real_buffers(model)
    return model.eval()


def twin_of(model: nn.Module) -> nn.Module:
    """The skeleton of a model that may be sharded, wrapped and adapted: its names, shapes and rules before all that.

    Raises:
        ModelError: it is no model of transformers.
    """
    cls: Any = original_class(model)
    if not hasattr(cls, "_from_config"):
        raise ModelError(f"{cls.__name__} is no model of transformers, whose configuration says how to make another")
    return make_skeleton(lambda: cls._from_config(in_float32(model.config), dtype=torch.float32))


def in_float32(config: Any) -> Any:
    """A copy of a configuration whose models, and those inside them, are made in float32."""
    config = copy.deepcopy(config)
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            each.dtype = torch.float32
    return config


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class of a model before FSDP made a subclass of it."""
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(model).__mro__ if issubclass(cls, nn.Module) and not issubclass(cls, FSDPModule))


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _require_real_buffers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name in module._non_persistent_buffers_set:  # noqa: SLF001 - no public one
                raise ModelError(
                    f"{type(model).__name__}: no file holds the buffer {path}.{name}, and it is not computed when the "
                    f"model is made; load it whole with load_causal_lm"
                )
