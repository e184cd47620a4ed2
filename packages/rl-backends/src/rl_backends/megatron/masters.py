"""What Megatron's optimizers keep on this rank of each parameter: the elements that they step, and state beside them.

That is the parameter itself; or a float32 copy of one of 16 bits; or, where data-parallel ranks share the optimizer, a
range of either, flattened. Checkpoints, offloading and `verify` read it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rl_backends.checkpoints.shards import TensorShard, flat_boxes
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import MegatronOptimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """What one of torch's optimizers steps on this rank of one parameter."""

    parameter: nn.Parameter
    """The model's."""
    tensor: Tensor
    """What is stepped: flat where it is a range, else shaped like the parameter."""
    optimizer: Optimizer
    """Which has its state."""
    group: dict[str, Any]
    """Of the optimizer, in which it is."""
    start: int | None = None
    """Where the range begins in the flattened parameter; None where it is all of it."""

    @property
    def is_copy(self) -> bool:
        """Whether the numbers are kept apart from the parameter's, in more digits."""
        return self.tensor.dtype != self.parameter.dtype

    def piece(self, held: HeldTensor, tensor: Tensor | None = None) -> TensorShard:
        """What it has of one tensor of the model, or of state that is shaped like it; perhaps no box at all."""
        local = (self.tensor if tensor is None else tensor).detach()
        if self.start is None:
            return TensorShard(local=held.view(local), shape=held.shape, boxes=held.parts)
        boxes = flat_boxes(held.parts, held.local.shape, start=self.start, end=self.start + local.numel())
        return TensorShard(local=local, shape=held.shape, boxes=tuple(boxes))

    def state(self) -> dict[str, Any]:
        """The optimizer's state of it, as torch's AdamW has it, which counts the steps of each parameter."""
        state: dict[str, Any] = self.optimizer.state.get(self.tensor, {})
        if state and not isinstance(self.optimizer, AdamW):  # Transformer Engine and Apex count those of a group
            state = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.tensor(float(self.group["step"]))
        return state

    def new_step(self) -> Tensor:
        """A count of steps, to be filled, where torch's optimizers keep it."""
        on_device = self.group.get("fused") or self.group.get("capturable")
        return torch.zeros((), device=self.tensor.device if on_device else "cpu")

    def put_state(self, state: dict[str, Any]) -> None:
        """Give the optimizer what `state` gave, or, where that is empty, let it begin."""
        counted_by_group = not isinstance(self.optimizer, AdamW)
        if counted_by_group:
            self.group.pop("step", None)
        self.optimizer.state.pop(self.tensor, None)
        if not state:
            return
        if counted_by_group:
            self.group["step"] = int(state["step"])
            state = {key: value for key, value in state.items() if key != "step"}
        self.optimizer.state[self.tensor] = state


def masters_of(optimizers: MegatronOptimizers) -> list[Master]:
    """Everything that is stepped on this rank."""
    found: list[Master] = []
    for part in optimizers.parts:
        groups = {id(tensor): group for group in part.optimizer.param_groups for tensor in group["params"]}
        found += [
            Master(parameter=parameter, tensor=tensor, optimizer=part.optimizer, group=groups[id(tensor)], start=start)
            for parameter, tensor, start in _stepped(part)
        ]
    return found


def _stepped(part: Any) -> Iterator[tuple[nn.Parameter, Tensor, int | None]]:
    """Each parameter of one of Megatron's optimizers, what is stepped of it, and where that begins if it is a range."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    if isinstance(part, DistributedOptimizer):
        copies = _pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups)
        for parameter, tensor in chain(copies, _pairs(part.model_fp32_groups, part.shard_fp32_groups)):
            yield parameter, tensor, part._get_model_param_range_map(parameter)["param"].start  # noqa: SLF001 - no public one
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        copies = _pairs(part.float16_groups, part.fp32_from_float16_groups)
        for parameter, tensor in chain(copies, _pairs(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups)):
            yield parameter, tensor, None
    else:
        assert isinstance(part, FP32Optimizer), type(part)
        for parameter in part.get_parameters():
            yield parameter, parameter, None


def _pairs(parameters: Sequence[Iterable[Any]], tensors: Sequence[Iterable[Any]]) -> Iterator[tuple[Any, Any]]:
    """Group by group."""
    for group, kept in zip(parameters, tensors, strict=True):
        yield from zip(group, kept, strict=True)
