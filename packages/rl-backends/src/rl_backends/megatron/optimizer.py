"""Megatron's optimizer over a model in Megatron's DDP, plain or distributed, and its schedule.

Settings come from one of two sources: Megatron's own words (`MegatronConfig.optimizer`, `.scheduler`), or the
`OptimizerConfig` of every other backend, translated so that the same recipe gives the same numbers. A schedule has no
state but the step's number. Megatron leaves norms and biases out of weight decay by a factor on their group,
`wd_mult`, which whoever sets the schedule has to apply.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rl_backends.checkpoints.optimizer_state import Stepped
from rl_backends.checkpoints.shards import TensorShard, flat_boxes
from rl_backends.choices import refuse
from rl_backends.errors import ModelError
from rl_backends.megatron.config import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.mapping import HeldTensor, parameters_of
from rl_backends.optimizers import OptimizerConfig, learning_rate_factor
from rl_backends.optimizers.optimizers import StageOptimizers, check_schedule, explain_schedule, table


@final
class NeutralSchedule:
    """The schedule of `OptimizerConfig`."""

    def __init__(self, inner: Any, config: OptimizerConfig, *, num_steps: int) -> None:
        check_schedule(config, num_steps=num_steps)
        self._inner = inner
        self._config = config
        self._num_steps = num_steps

    def learning_rate(self, index: int) -> float:
        """Of step `index`."""
        return self._config.lr * learning_rate_factor(index, self._config, num_steps=self._num_steps)

    def apply(self, index: int) -> None:
        """Give every group of parameters what it has in step `index`."""
        for group in self._inner.param_groups:
            group["lr"] = self.learning_rate(index)
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]

    def explain(self) -> str:
        """In words."""
        return f"lr={self._config.lr:g}, {explain_schedule(self._config, num_steps=self._num_steps)}"


@final
class MegatronSchedule:
    """Megatron's own schedule, of learning rate and weight decay."""

    def __init__(
        self, inner: Any, optimizer: MegatronOptimizerConfig, scheduler: MegatronSchedulerConfig, *, num_steps: int
    ) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self._decay_steps = scheduler.lr_decay_iters or num_steps
        problems = []
        if scheduler.lr_warmup_iters >= self._decay_steps:
            default = "" if scheduler.lr_decay_iters is not None else ", which is the steps of the stage,"
            problems.append(
                f"lr_warmup_iters={scheduler.lr_warmup_iters} must be less than lr_decay_iters={self._decay_steps}"
                f"{default} or the learning rate goes down before it is up"
            )
        if scheduler.lr_warmup_init > optimizer.lr:
            problems.append(
                f"lr_warmup_init={scheduler.lr_warmup_init} must be at most lr={optimizer.lr}, which the warm-up goes "
                f"up to"
            )
        refuse(problems)
        self._inner = inner
        self._optimizer = optimizer
        self._config = scheduler
        start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
        self._scheduler = OptimizerParamScheduler(
            inner,
            init_lr=scheduler.lr_warmup_init,
            max_lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            lr_warmup_steps=scheduler.lr_warmup_iters,
            lr_decay_steps=self._decay_steps,
            lr_decay_style=scheduler.lr_decay_style,
            start_wd=optimizer.weight_decay if start is None else start,
            end_wd=optimizer.weight_decay if end is None else end,
            wd_incr_steps=num_steps,
            wd_incr_style=scheduler.weight_decay_incr_style,
        )

    def learning_rate(self, index: int) -> float:
        """Of step `index`."""
        self._scheduler.num_steps = index
        return float(self._scheduler.get_lr({}))

    def apply(self, index: int) -> None:
        """Give every group of parameters what it has in step `index`."""
        for group in self._inner.param_groups:
            # Megatron prefers a group's own, which come back with a checkpoint of other settings.
            group.update(max_lr=self._optimizer.lr, min_lr=self._optimizer.min_lr)
        self._scheduler.num_steps = index
        self._scheduler.step(0)

    def explain(self) -> str:
        """In words."""
        config, scheduler = self._config, self._scheduler
        parts = (
            [f"{config.lr_warmup_iters} steps of warm-up from {config.lr_warmup_init:g}"]
            if config.lr_warmup_iters
            else []
        )
        constant = config.lr_decay_style == "constant"
        down = f"{config.lr_decay_style} to {self._optimizer.min_lr:g} at step {self._decay_steps}"
        parts.append("constant" if constant else down)
        text = f"lr={self._optimizer.lr:g}, {', then '.join(parts)}, by Megatron's scheduler"
        if scheduler.start_wd == scheduler.end_wd:
            return text
        grows = f"{scheduler.start_wd:g} to {scheduler.end_wd:g} ({config.weight_decay_incr_style})"
        return f"{text}; weight decay from {grows} in {scheduler.wd_incr_steps} steps"


def make_optimizers(  # noqa: PLR0917 - what is optimized, and the two that may say how
    ddp: Sequence[nn.Module],
    transformer_config: Any,
    config: MegatronConfig,
    optimizer: OptimizerConfig | None,
    *,
    num_steps: int,
) -> "MegatronOptimizers":
    """Megatron's optimizer over the trainable parameters of all `ddp`, for a stage of `num_steps` steps.

    Make it after the weights were loaded: in bfloat16 it copies them into float32 here. Collective over all ranks.

    ddp: Megatron's `DistributedDataParallel` of each chunk, whose state is shared out as `config` says.
    transformer_config: of the model.
    optimizer: what training was started with; used where `config.optimizer` is None.

    Raises:
        ValueError: no source at all; settings that have no counterpart in Megatron, all of them at once; a schedule
            that does not fit into `num_steps`.
        ModelError: nothing is trainable.
    """
    from megatron.core.optimizer import OptimizerConfig as TheirConfig
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    settings = config.optimizer or _translated(optimizer)
    of_adam = {field.name: getattr(settings, field.name) for field in fields(settings)}
    del of_adam["on_nonfinite_gradient"]
    notes: list[str] = []
    with cpu_compat():
        theirs = TheirConfig(
            **{**of_adam, "clip_grad": settings.clip_grad or 0.0},
            bf16=transformer_config.bf16,
            params_dtype=transformer_config.params_dtype,
            use_distributed_optimizer=config.use_distributed_optimizer,
            log_num_zeros_in_grad=False,
        )
        # Only an empty dict lets everything decay; the standard ones leave out norms and biases, as Megatron does.
        decay_vectors = config.optimizer is None and optimizer is not None and optimizer.decay_vectors
        overrides = {} if decay_vectors else get_standard_config_overrides(theirs)
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
        schedule: NeutralSchedule | MegatronSchedule
        if config.optimizer is not None:
            scheduler = config.scheduler or MegatronSchedulerConfig()
            schedule = MegatronSchedule(inner, config.optimizer, scheduler, num_steps=num_steps)
            if optimizer is not None:
                unused = f"name={optimizer.name!r}, lr={optimizer.lr:g}, schedule={optimizer.schedule!r}"
                notes.append(
                    f"From megatron_cfg.optimizer; the optimizer that training was started with ({unused}) is not used."
                )
        else:
            assert optimizer is not None
            schedule = NeutralSchedule(inner, optimizer, num_steps=num_steps)
        return MegatronOptimizers(ddp, inner, schedule, settings=settings, num_steps=num_steps, notes=notes)


@final
class MegatronOptimizers(StageOptimizers):
    """What `make_optimizers` made: Megatron's optimizer, and the learning rate of the next step."""

    def __init__(
        self,
        ddp: Sequence[nn.Module],
        inner: Any,
        schedule: NeutralSchedule | MegatronSchedule,
        *,
        settings: MegatronOptimizerConfig,
        num_steps: int,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(num_steps=num_steps)
        self.inner = inner
        """Megatron's `MegatronOptimizer`, for whatever keeps its state. Its learning rate is set anew by every step."""
        self.settings = settings
        """Of AdamW, and of the gradient step."""
        self._ddp: Sequence[Any] = ddp
        self._schedule = schedule
        self._notes = notes
        schedule.apply(0)

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

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._schedule.learning_rate(self.num_steps_taken)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter along the gradient that `inner.prepare_grads()` has laid out."""
        with cpu_compat():
            self._schedule.apply(self.num_steps_taken)
            self.inner.step_with_ready_grads()
        self.num_steps_taken += 1

    def zero_grad(self) -> None:
        """Forget every gradient, also what microbatches have summed up."""
        with cpu_compat(), warnings.catch_warnings():
            # The distributed optimizer asks views of float32 parameters whether they have one.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            self.inner.zero_grad()
            for chunk in self._ddp:
                chunk.zero_grad_buffer()

    def explain(self) -> str:
        """The optimizer, its schedule, and what each group of parameters holds on this rank."""
        kinds = dict.fromkeys(f"{type(part).__name__} over {type(part.optimizer).__name__}" for part in self.parts)
        lines = [f"Megatron's {', '.join(kinds)}: {self._schedule.explain()}", *self._notes]
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
        return "\n".join([*lines, *table(rows)])


def _translated(config: OptimizerConfig | None) -> MegatronOptimizerConfig:
    """What the `OptimizerConfig` of every other backend says of AdamW and of the gradient step, in Megatron's words."""
    if config is None:
        raise ValueError(
            "there is no optimizer: set megatron_cfg.optimizer (and megatron_cfg.scheduler), or start training with an "
            "OptimizerConfig"
        )
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
        raise ValueError(
            f"the Megatron backend has no counterpart of {'; of '.join(problems)}. Or set megatron_cfg.optimizer, "
            f"which is then used instead"
        )
    return MegatronOptimizerConfig(
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.max_grad_norm,
        on_nonfinite_gradient=config.on_nonfinite_gradient,
    )


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
