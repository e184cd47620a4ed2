"""A method that a model calls between layers on the residual stream, under sequence parallelism.

Qwen3-VL's `_deepstack_process` adds features of an image to some positions: it needs the whole sequence. The stream is
gathered for it and cut again; every rank computes the same, so that gradients are whole on each.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.local_parameters import LocalParameters, ParameterRule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class WholeMethod(LocalParameters):
    """Let the method `name` of a module see the whole residual stream, its first argument and its result."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """None: parameters are left alone."""
        del module
        return {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        method = getattr(type(module), self.name)
        module.__dict__[self.name] = partial(_on_whole, method, module, mesh=device_mesh)
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


def _on_whole(
    method: Callable[..., Tensor], module: nn.Module, hidden: Tensor, *args: Any, mesh: "DeviceMesh", **kwargs: Any
) -> Tensor:
    # A tensor of its own: the method may change it in place, which a view of a DTensor must not be.
    whole = hidden.redistribute(placements=[Replicate()]).to_local().clone() if is_dtensor(hidden) else hidden
    changed = method(module, whole, *args, **kwargs)
    return DTensor.from_local(changed, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
