"""What enters a decoder layer beside the residual stream, when that is cut along the sequence.

Gemma 4 hands each layer an input of its own, [B, S, features], which must be cut where the residual stream is, and
multiplies the stream by a buffer of the layer.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.in_block import own_names
from rl_parallel_plans.styles.local_parameters import REPLICATED, LocalParameters, ParameterRule, shadow, unshadow

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SplitLayerInputs(LocalParameters):
    """Cut arguments [B, S, ...] of a layer along the sequence, and let its buffers meet DTensors.

    arguments: names in the layer's forward; one that is absent or None is left alone, as is what is cut already.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        self.arguments = tuple(arguments)

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None: a layer's parameters are its children's."""
        del module
        return {}

    def collectives(self) -> tuple[dict[str, int], dict[str, int]]:
        """The gradient of what is cut is gathered."""
        return {}, {"all_gather": len(self.arguments)}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        names = list(inspect.signature(module.forward).parameters)
        places = {name: names.index(name) for name in self.arguments}
        module.register_forward_pre_hook(partial(_cut, mesh=device_mesh, places=places), with_kwargs=True)
        module.register_forward_pre_hook(partial(_buffers_in, mesh=device_mesh))
        module.register_forward_hook(unshadow, always_call=True)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.arguments)})"


class LayerReads(LocalParameters):
    """A layer that calls other methods of its children than forward: in these, the children are whole and plain."""

    def __init__(self, children: Sequence[str]) -> None:
        super().__init__()
        self.children = tuple(children)

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None: a layer's parameters are its children's."""
        del module
        return {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        del device_mesh
        for name in self.children:
            child = module.get_submodule(name)
            read = [(part, dict.fromkeys(names, REPLICATED)) for part in child.modules() if (names := own_names(part))]
            # Around the methods and not around the layer: recomputing it may run its forward without its hooks.
            for method in _methods(child):
                child.__dict__[method] = partial(_reading, getattr(child, method), read)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.children)})"


def _methods(module: nn.Module) -> list[str]:
    """Names of what a module's class defines beside forward."""
    own = [cls for cls in type(module).__mro__ if cls not in nn.Module.__mro__]
    names = dict.fromkeys(name for cls in own for name, value in vars(cls).items() if inspect.isfunction(value))
    return [name for name in names if name != "forward" and not name.startswith("__")]


def _reading(
    method: Callable[..., Any],
    children: Sequence[tuple[nn.Module, Mapping[str, ParameterRule]]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    for child, rules in children:
        shadow(child, (), rules=rules)
    try:
        return method(*args, **kwargs)
    finally:
        for child, _ in children:
            unshadow(child, (), None)


def _cut(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, mesh: "DeviceMesh", places: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_dtensor(value):
            return value
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])

    positions = set(places.values())
    named = {name: cut(value) if name in places else value for name, value in kwargs.items()}
    return tuple(cut(value) if place in positions else value for place, value in enumerate(args)), named


def _buffers_in(module: nn.Module, _args: object, *, mesh: "DeviceMesh") -> None:
    # An entry of the instance's __dict__ hides the buffer of the same name, which stays plain.
    names = [name for name, _ in module.named_buffers(recurse=False) if name not in module.__dict__]
    for name in names:
        module.__dict__[name] = DTensor.from_local(module.get_buffer(name), mesh, [Replicate()], run_check=False)
    module.__dict__.setdefault("shadowed", []).append(names)
