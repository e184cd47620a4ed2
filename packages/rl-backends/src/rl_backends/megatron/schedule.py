"""The learning rate and the weight decay of each step, put onto the groups of Megatron's optimizer.

From one of two sources: `rl_backends.optimizers.learning_rate_factor`, the same function of the step's number as under
every other backend, or Megatron's own `OptimizerParamScheduler`. Knows groups of parameters and steps; does not know
gradients. A schedule has no state but the step's number, which its owner keeps.

Megatron leaves out norms and biases by a factor on their group, `wd_mult`, that nothing but its scheduler applies.
"""

from typing import Any, Protocol, final, runtime_checkable

from rl_backends.megatron.config import MegatronOptimizerConfig, MegatronSchedulerConfig
from rl_backends.optimizers import OptimizerConfig, learning_rate_factor
from rl_backends.optimizers.optimizers import check_schedule
from rl_backends.optimizers.report import explain_schedule

__all__ = ["MegatronSchedule", "NeutralSchedule", "Schedule"]


@runtime_checkable
class Schedule(Protocol):
    """What the optimizer needs to know of steps, which count from 0."""

    def learning_rate(self, index: int) -> float:
        """Of step `index`."""
        ...

    def apply(self, index: int) -> None:
        """Give every group of parameters what it has in step `index`, whatever it had before."""
        ...

    def explain(self) -> str:
        """In words."""
        ...


@final
class NeutralSchedule:
    """The schedule of `OptimizerConfig`.

    Raises:
        ValueError: it does not fit into `num_steps`.
    """

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
    """Megatron's own schedule, of learning rate and weight decay.

    Raises:
        ValueError: what Megatron would assert; all of it at once.
    """

    def __init__(
        self, inner: Any, optimizer: MegatronOptimizerConfig, scheduler: MegatronSchedulerConfig, *, num_steps: int
    ) -> None:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self._decay_steps = scheduler.lr_decay_iters or num_steps
        _check_megatron_schedule(optimizer, scheduler, decay_steps=self._decay_steps)
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


def _check_megatron_schedule(
    optimizer: MegatronOptimizerConfig, scheduler: MegatronSchedulerConfig, *, decay_steps: int
) -> None:
    default = "" if scheduler.lr_decay_iters is not None else ", which is the steps of the stage,"
    problems = [
        f"lr_warmup_iters={scheduler.lr_warmup_iters} must be less than lr_decay_iters={decay_steps}{default} or "
        f"the learning rate goes down before it is up"
        if scheduler.lr_warmup_iters >= decay_steps
        else "",
        f"lr_warmup_init={scheduler.lr_warmup_init} must be at most lr={optimizer.lr}, which the warm-up goes up to"
        if scheduler.lr_warmup_init > optimizer.lr
        else "",
    ]
    if found := [problem for problem in problems if problem]:
        raise ValueError("; ".join(found))
