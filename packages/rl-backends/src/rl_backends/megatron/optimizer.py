"""Megatron's optimizer over a model in Megatron's DDP, plain or distributed, with the numbers of every other backend.

The schedule is that of `OptimizerConfig`, set before each step. Megatron leaves norms and biases out of weight decay by
a factor on their group, `wd_mult`, which whoever sets the schedule has to apply.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rl_backends.checkpoints.optimizer_state import Stepped
from rl_backends.checkpoints.shards import TensorShard, flat_boxes
from rl_backends.errors import ModelError
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat, no_cuda_calls
from rl_backends.megatron.mapping import HeldTensor, parameters_of
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import StageOptimizers, explain_schedule, table


def make_optimizers(
    ddp: Sequence[nn.Module], config: MegatronConfig, optimizer: OptimizerConfig, *, num_steps: int
) -> "MegatronOptimizers":
    """Megatron's optimizer over the trainable parameters of all `ddp`, for a stage of `num_steps` steps.

    Make it after the weights were loaded: in bfloat16 it copies them into float32 here. Collective over all ranks.

    ddp: Megatron's `DistributedDataParallel` of each chunk, whose state is shared out as `config` says.
    optimizer: as of every backend.

    Raises:
        ValueError: settings that have no counterpart in Megatron, all of them at once; a schedule that does not fit
            into `num_steps`.
        ModelError: nothing is trainable.
    """
    from megatron.core.optimizer import OptimizerConfig as TheirConfig
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    _require_counterparts(optimizer)
    with cpu_compat():
        theirs = TheirConfig(
            optimizer="adam",  # with decoupled weight decay
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_eps=optimizer.eps,
            clip_grad=optimizer.max_grad_norm or 0.0,
            bf16=config.precision == "bfloat16",
            params_dtype=getattr(torch, config.precision),
            use_distributed_optimizer=config.use_distributed_optimizer,
            log_num_zeros_in_grad=False,
        )
        # Only an empty dict lets everything decay; the standard ones leave out norms and biases, as Megatron does.
        overrides = {} if optimizer.decay_vectors else get_standard_config_overrides(theirs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="WARNING: there is no optimizer on RANK")  # an error below
            inner = get_megatron_optimizer(theirs, list(ddp), config_overrides=overrides, use_gloo_process_groups=False)
        if not inner.param_groups:
            raise ModelError(
                f"none of the {len(list(parameters_of(ddp)))} parameters of {type(ddp[0]).__name__} requires a "
                f"gradient on any rank, so there is nothing to optimize: unfreeze some"
            )
        for part in inner.chained_optimizers:
            # One kernel for all parameters, as the other backend's AdamW: Megatron leaves torch's at a loop over them.
            if isinstance(getattr(part, "optimizer", None), AdamW):
                for group in part.optimizer.param_groups:
                    group.update(fused=True, foreach=False)
        return MegatronOptimizers(ddp, inner, optimizer, num_steps=num_steps)


@final
class MegatronOptimizers(StageOptimizers):
    """What `make_optimizers` made: Megatron's optimizer, and the learning rate of the next step."""

    def __init__(self, ddp: Sequence[nn.Module], inner: Any, config: OptimizerConfig, *, num_steps: int) -> None:
        super().__init__(config, num_steps=num_steps)
        self.inner = inner
        """Megatron's `MegatronOptimizer`, for whatever keeps its state. Its learning rate is set anew by every step."""
        self._ddp: Sequence[Any] = ddp
        self._apply_schedule()

    @property
    def parts(self) -> tuple[Any, ...]:
        """Megatron's optimizers inside the chained one, which experts have their own of."""
        return tuple(each for each in self.inner.chained_optimizers if not each.is_stub_optimizer)

    @property
    def each(self) -> tuple[Optimizer, ...]:
        """Torch's optimizers inside Megatron's."""
        return tuple(part.optimizer for part in self.parts)

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's trainable parameters by Megatron's names, in which each pipeline stage counts its own layers."""
        named = parameters_of([each.module for each in self._ddp])
        return {name: parameter for *_, name, parameter in named if parameter.requires_grad}

    def _apply_schedule(self) -> None:
        """Give every group of parameters what it has in the next step."""
        for group in self.inner.param_groups:
            group["lr"] = self.learning_rate
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter along the gradient that `inner.prepare_grads()` has laid out."""
        with cpu_compat(), no_cuda_calls():
            self._apply_schedule()
            self.inner.step_with_ready_grads()
        self.num_steps_taken += 1

    def zero_grad(self) -> None:  # noqa: D102
        with cpu_compat(), warnings.catch_warnings():
            # The distributed optimizer asks views of float32 parameters whether they have one.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            self.inner.zero_grad()
            for chunk in self._ddp:
                chunk.zero_grad_buffer()

    def explain(self) -> str:
        """The optimizer, its schedule, and what each group of parameters holds on this rank."""
        kinds = dict.fromkeys(f"{type(part).__name__} over {type(part.optimizer).__name__}" for part in self.parts)
        schedule = explain_schedule(self.config, num_steps=self._num_steps)
        rows = [["weight decay", "experts", "parameters", "elements here"]]
        rows += [
            [
                f"{group['weight_decay']:g}" if group["wd_mult"] else "none",
                "yes" if group["is_expert_parallel"] else "no",
                f"{len(group['params']):,}",
                f"{sum(each.numel() for each in group['params']):,}",
            ]
            for group in self.inner.param_groups
        ]
        return "\n".join([f"Megatron's {', '.join(kinds)}: lr={self.config.lr:g}, {schedule}", *table(rows)])


def _require_counterparts(config: OptimizerConfig) -> None:
    """Refuse what Megatron's optimizer has no counterpart of."""
    problems = []
    if config.name != "adamw":
        problems.append(f"name={config.name!r}: take 'adamw'")
    if config.no_decay:
        problems.append(
            f"no_decay={config.no_decay}: names are those of Hugging Face, and Megatron holds several in one "
            f"parameter; leave it out"
        )
    if config.name == "adamw" and config.implementation != "fused":
        problems.append(
            f"implementation={config.implementation!r}: Megatron takes the AdamW of Transformer Engine or Apex where "
            f"there is one, else torch's; leave it out"
        )
    if problems:
        raise ValueError(f"the Megatron backend has no counterpart of {'; of '.join(problems)}")


# ---- What the optimizers keep on this rank of each parameter: the elements that they step, and state beside them.
#
# That is the parameter itself; or a float32 copy of one of 16 bits; or, where data-parallel ranks share the optimizer,
# a range of either, flattened. Checkpoints, offloading and `verify` read it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Master(Stepped):
    """What one of torch's optimizers steps on this rank of one parameter: flat where it is a range of it."""

    parameter: nn.Parameter
    """The model's."""
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
        state = Stepped.state(self)
        if state and self._counted_by_group:
            state = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.tensor(float(self.group["step"]))
        return state

    def put_state(self, state: dict[str, Any]) -> None:
        """Give the optimizer what `state` gave, or, where that is empty, let it begin."""
        if self._counted_by_group:
            self.group.pop("step", None)
            if state:
                self.group["step"] = int(state["step"])
                state = {key: value for key, value in state.items() if key != "step"}
        Stepped.put_state(self, state)

    @property
    def _counted_by_group(self) -> bool:
        """Whether steps are those of a group, as in the optimizers of Transformer Engine and Apex."""
        return not isinstance(self.optimizer, AdamW)


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
