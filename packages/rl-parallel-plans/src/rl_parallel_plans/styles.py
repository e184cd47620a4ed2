"""The one parallel style that torch lacks: a module that every rank runs whole, with parameters on the mesh.

It imports `torch.distributed.tensor`; nothing imports it before a plan with tp > 1 is asked for.

Two things differ from leaving such a module alone.

* Its parameters are DTensors on the tp mesh like all others, so that optimizers and norms meet one mesh.
* `partial_gradient=True` sums the gradient over the mesh. A per-head norm (Qwen3's `q_norm`) is the same on every rank
  but sees only that rank's heads, so each rank holds one term of its gradient; without the sum the copies drift apart.
"""

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReplicatedParallel(ParallelStyle):
    """Keep a module's own parameters whole on every rank; inside it, everything is a plain tensor.

    partial_gradient: this rank's gradient is one term of the sum over ranks, and is summed in backward, each time:
        right under accumulation too. Otherwise every rank is known to hold the whole gradient already.
    dtensor_output: hand the output on as DTensor(Replicate), so that the column-wise layers that read it share ONE
        all-reduce of its gradient instead of one each.
    """

    def __init__(self, *, partial_gradient: bool = False, dtensor_output: bool = False) -> None:
        super().__init__()
        self.partial_gradient = partial_gradient
        self.dtensor_output = dtensor_output

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each of the module's own parameters."""
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            old = module.get_parameter(name)
            new = distribute_tensor(old.detach(), device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        gradient = Partial() if self.partial_gradient else Replicate()
        module.register_forward_pre_hook(partial(_shadow, names=names, gradient=gradient))
        module.register_forward_hook(partial(_unshadow, names=names), always_call=True)
        if self.dtensor_output:
            module.register_forward_hook(partial(_replicated, mesh=device_mesh))
        return module

    def __repr__(self) -> str:
        options = [name for name in ("partial_gradient", "dtensor_output") if getattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}=True' for name in options)})"


def keep_gradient_sharded(embedding: nn.Embedding) -> None:
    """Make the gradient of a sharded embedding sharded as its weight is.

    DTensor computes it whole on every rank (torch 2.13), where it would stay, vocabulary times hidden, until the step.
    """
    embedding.register_forward_pre_hook(_shadow_sharded)
    embedding.register_forward_hook(partial(_unshadow, names=["weight"]), always_call=True)


def _shadow_sharded(module: nn.Module, _args: object) -> None:
    weight = module.get_parameter("weight")
    if is_dtensor(weight):
        # Nothing forward; backward each rank keeps its rows of the gradient.
        module.__dict__["weight"] = weight.redistribute(placements=weight.placements)


def _shadow(module: nn.Module, _args: object, *, names: list[str], gradient: Placement) -> None:
    # An entry of the instance's __dict__ hides the parameter of the same name, which stays registered.
    for name, parameter in module.named_parameters(recurse=False):
        if name in names and is_dtensor(parameter):
            # The redistribution does nothing forward; backward it turns the Partial gradient into the whole one.
            whole = parameter.redistribute(placements=[Replicate()])
            module.__dict__[name] = whole.to_local(grad_placements=[gradient])


def _unshadow(module: nn.Module, _args: object, _output: object, *, names: list[str]) -> None:
    for name in names:
        module.__dict__.pop(name, None)


def _replicated(_module: nn.Module, _args: object, output: Tensor, *, mesh: "DeviceMesh") -> DTensor:
    return DTensor.from_local(output, mesh, [Replicate()], run_check=False)
