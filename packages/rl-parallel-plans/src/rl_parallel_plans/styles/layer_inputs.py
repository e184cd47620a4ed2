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
from rl_parallel_plans.styles.local_parameters import (
    REPLICATED,
    LocalParameters,
    ParameterRule,
    compute_locally,
    local_views,
)
from rl_parallel_plans.styles.sharded_forward import wrap_forward

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
        wrap_forward(module, partial(_with_cut_inputs, mesh=device_mesh, places=places))
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
        # Recomputing a layer runs its wrappers again, and with them this.
        read = [part for name in self.children for part in module.get_submodule(name).modules()]
        replicated = [(part, dict.fromkeys(own_names(part), REPLICATED)) for part in read]
        compute_locally(module, [(part, local_views(device_mesh, rules)) for part, rules in replicated])
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.children)})"


def _with_cut_inputs(  # noqa: PLR0917 - a wrapper
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: "DeviceMesh",
    places: Mapping[str, int],
) -> Any:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or is_dtensor(value):
            return value
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])

    positions = set(places.values())
    named = {name: cut(value) if name in places else value for name, value in kwargs.items()}
    given = [cut(value) if place in positions else value for place, value in enumerate(args)]
    # An entry of the instance's __dict__ hides the buffer of the same name, which stays plain.
    names = [name for name, _ in module.named_buffers(recurse=False) if name not in module.__dict__]
    try:
        for name in names:
            module.__dict__[name] = DTensor.from_local(module.get_buffer(name), mesh, [Replicate()], run_check=False)
        return call(*given, **named)
    finally:
        for name in names:
            module.__dict__.pop(name, None)
