"""Modules outside the blocks, which every rank runs whole, or each rank on its part of the sequence.

Their parameters are DTensors on the tp mesh like all others, so that optimizers and norms meet one mesh.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.styles.in_block import own_names
from rl_parallel_plans.styles.local_parameters import REPLICATED, REPLICATED_PARTIAL, LocalParameters, ParameterRule
from rl_parallel_plans.styles.sharded_forward import wrap_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ReplicatedParallel(LocalParameters):
    """Keep a module's own parameters whole on every rank; inside it, everything is a plain tensor.

    partial_gradient: this rank's gradient is one term of the sum over ranks, and is completed at the end of each
        backward, once, whatever is accumulated. Otherwise every rank is known to hold the whole gradient already.
        A norm over each head (Qwen3's `q_norm`) sees only its rank's heads: without the sum the copies drift apart.
    """

    def __init__(self, *, partial_gradient: bool = False) -> None:
        super().__init__()
        self.partial_gradient = partial_gradient

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole."""
        return dict.fromkeys(own_names(module), REPLICATED_PARTIAL if self.partial_gradient else REPLICATED)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'partial_gradient=True' if self.partial_gradient else ''})"


class SequenceShardedParallel(LocalParameters):
    """Run a module that treats each position by itself (a norm, a linear layer) on this rank's part of the sequence.

    gather: hand the output on whole and plain: where the residual stream ends.

    Input and output are DTensors Shard(1); the module sees plain tensors. Each rank sees its positions only, so that
    the gradient of what is whole is one term of a sum. Raises PlanError for an input that is not cut.
    """

    def __init__(self, *, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather

    def rules(self, module: nn.Module) -> Mapping[str, ParameterRule]:
        """Everything whole, its gradient a sum."""
        return dict.fromkeys(own_names(module), REPLICATED_PARTIAL)

    def collectives(self) -> tuple[dict[str, int], dict[str, int]]:
        """Where it gathers, one all-gather forward."""
        return ({"all_gather": 1} if self.gather else {}), {}

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        wrap_forward(module, partial(_on_positions, mesh=device_mesh, gather=self.gather))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'gather=True' if self.gather else ''})"


def _on_positions(  # noqa: PLR0917 - a wrapper
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: "DeviceMesh",
    gather: bool,
) -> Tensor:
    if not args or not is_dtensor(args[0]):
        raise PlanError(
            f"{type(module).__name__} was planned for a residual stream that is cut along the sequence, and its input "
            "is whole: its model does not call it where the plan assumes; plan with sequence_parallel=False"
        )
    length = args[0].shape[1]
    output = call(*[value.to_local() if is_dtensor(value) else value for value in args], **kwargs)
    shape = (output.shape[0], length, *output.shape[2:])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    positions = DTensor.from_local(output, mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)  # type: ignore[arg-type]
    return positions.redistribute(placements=[Replicate()]).to_local() if gather else positions
