"""The optimizers of a model and their learning rate, stepped as one.

Knows parameters, shards and steps; does not know losses, batches or clipping (`gradient_step`). One object for what is
two in torch under Muon, and whose schedule is a number of steps instead of an object with state of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rl_backends.errors import CheckpointError
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.groups import ParameterGroup, group_parameters
from rl_backends.optimizers.report import explain_optimizers, state_bytes
from rl_backends.optimizers.schedules import check_schedule, learning_rate_factor
from rl_parallel_plans import to_local_if_dtensor

__all__ = ["Optimizers", "check_schedule_state", "make_optimizers"]

COUNTED = ("num_steps_skipped", "num_steps_taken")
"""What the state of a schedule consists of."""


def make_optimizers(model: nn.Module, config: OptimizerConfig, *, num_steps: int) -> "Optimizers":
    """Optimizers over the trainable parameters of `model`, plain or sharded, for a stage of `num_steps` steps.

    Make them after the model was sharded and moved to its device. No collective.

    Raises:
        ModelError: nothing is trainable.
        ValueError: the schedule does not fit into `num_steps`; a pattern of `no_decay` matches nothing; Muon is left
            without a matrix; torch has no such implementation for these parameters.
        ImportError: `adamw_8bit` without torchao.
    """
    check_schedule(config, num_steps=num_steps)
    groups = group_parameters(model, config)
    by_muon = [group for group in groups if group.trained_by == "muon"]
    by_adamw = [group for group in groups if group.trained_by == "adamw"]
    if config.name == "muon" and not by_muon:
        raise ValueError(
            f"{type(model).__name__} has no trainable matrix inside a layer, which is what name='muon' trains: take "
            "name='adamw'"
        )
    optimizers: list[tuple[torch.optim.Optimizer, float]] = []
    if by_muon:
        optimizers.append((_make_muon(by_muon, config), 1.0))
    if by_adamw:
        ratio = config.muon.adamw_lr_ratio if config.name == "muon" else 1.0
        optimizers.append((_make_adamw(by_adamw, config, lr=config.lr * ratio), ratio))
    return Optimizers(optimizers, groups, config, num_steps=num_steps)


@final
class Optimizers:
    """What `make_optimizers` made: one or two torch optimizers, and the learning rate of the next step."""

    def __init__(
        self,
        optimizers: Sequence[tuple[torch.optim.Optimizer, float]],
        groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        *,
        num_steps: int,
    ) -> None:
        self.each: tuple[torch.optim.Optimizer, ...] = tuple(optimizer for optimizer, _ in optimizers)
        """torch's optimizers, for whatever keeps their state. Their learning rate is set anew by every step."""
        self.groups: tuple[ParameterGroup, ...] = tuple(groups)
        """Every trainable parameter, once."""
        self.num_steps_taken = 0
        """Steps since the stage began, without those left out for a gradient that was not finite."""
        self.num_steps_skipped = 0
        """Steps that were left out for a gradient that was not finite."""
        self._ratios = [ratio for _, ratio in optimizers]
        self._config = config
        self._num_steps = num_steps

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Every trainable parameter by its name in the unsharded model: this rank's shards, also while gathered."""
        return {
            name: parameter
            for group in self.groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        }

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self._config.lr * learning_rate_factor(self.num_steps_taken, self._config, num_steps=self._num_steps)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank from the first step on."""
        return sum(state_bytes(group, self._config) for group in self.groups)

    def step(self) -> None:
        """Update every parameter that has a gradient, with the learning rate of this step."""
        for optimizer, ratio in zip(self.each, self._ratios, strict=True):
            _set_learning_rate(optimizer, self.learning_rate * ratio)
            optimizer.step()
        self.num_steps_taken += 1

    def zero_grad(self) -> None:
        """Forget every gradient."""
        for optimizer in self.each:
            optimizer.zero_grad()

    def schedule_state(self) -> dict[str, int]:
        """How far the schedule has come; JSON can hold it."""
        return {"num_steps_taken": self.num_steps_taken, "num_steps_skipped": self.num_steps_skipped}

    def load_schedule_state(self, state: Mapping[str, int]) -> None:
        """Go on where `schedule_state` was taken, along this stage's own schedule.

        Raises:
            CheckpointError: the state is not one, or the stage is over by then.
        """
        check_schedule_state(state, num_steps=self._num_steps)
        self.num_steps_taken = state["num_steps_taken"]
        self.num_steps_skipped = state["num_steps_skipped"]

    def explain(self) -> str:
        """The optimizer, its schedule, and what each group of parameters holds and needs."""
        return explain_optimizers(self.groups, self._config, num_steps=self._num_steps)


def check_schedule_state(state: Mapping[str, int], *, num_steps: int) -> None:
    """CheckpointError where it is not what `schedule_state` gives, or a stage of `num_steps` is over by then."""
    if sorted(state) != [*COUNTED] or not all(type(value) is int and value >= 0 for value in state.values()):
        raise CheckpointError(f"{dict(state)} is no state of a schedule, which has {[*COUNTED]}, all >= 0")
    if state["num_steps_taken"] > num_steps:
        raise CheckpointError(
            f"the checkpoint has taken {state['num_steps_taken']} steps, and this stage has {num_steps}: "
            "start it with as many steps as it had, or more"
        )


def _make_muon(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> torch.optim.Optimizer:
    from rl_backends.optimizers.muon import Muon

    return Muon(
        _as_torch_has_them(groups, config),
        lr=config.lr,
        momentum=config.muon.momentum,
        nesterov=config.muon.nesterov,
        adjust_lr_fn=config.muon.adjust_lr_fn,
        dtype=getattr(torch, config.muon.dtype),
    )


def _make_adamw(groups: Sequence[ParameterGroup], config: OptimizerConfig, *, lr: float) -> torch.optim.Optimizer:
    parts = _as_torch_has_them(groups, config)
    if config.name == "adamw_8bit":
        from rl_backends.optimizers.torchao import make_adamw_8bit

        return make_adamw_8bit(parts, lr=lr, betas=config.betas, eps=config.eps)
    _check_implementation(groups, config)
    return AdamW(parts, lr=lr, betas=config.betas, eps=config.eps, **_implementation(config))


def _implementation(config: OptimizerConfig) -> dict[str, Any]:
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}


def _check_implementation(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> None:
    """Ask torch, which otherwise tells at the first step: one step of one element of each kind."""
    local = [to_local_if_dtensor(each) for group in groups for each in group.parameters]
    for device, dtype in {(each.device, each.dtype) for each in local}:
        element = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        element.grad = torch.zeros_like(element)
        try:
            AdamW([element], **_implementation(config)).step()
        except RuntimeError as error:
            raise ValueError(
                f"torch has no implementation={config.implementation!r} of AdamW for {dtype} on {device} ({error}): "
                "take 'foreach' or 'for-loop'"
            ) from error


def _as_torch_has_them(groups: Sequence[ParameterGroup], config: OptimizerConfig) -> list[dict[str, Any]]:
    return [
        {"params": list(group.parameters), "weight_decay": config.weight_decay if group.decays else 0.0}
        for group in groups
    ]


def _set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # torchao compiles its step with the learning rate as an input
        else:
            group["lr"] = lr
