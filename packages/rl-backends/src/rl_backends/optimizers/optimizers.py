"""Optimizers of a backend: parameter groups, learning-rate schedule, clipping, refusal of non-finite steps.

With w warm-up steps, n steps, r = final_lr_ratio and p = (i - w) / (n - w - 1), which is 1 at the last step n - 1:

    warm-up    (i + 1) / w
    linear     1 - (1 - r) p
    cosine     r + (1 - r) (1 + cos(pi p)) / 2            arXiv:1608.03983
    wsd        1, and 1 - (1 - r) k / d at the k-th of the last d = decay_steps steps    arXiv:2404.06395

Steps after the last keep its share.

`make_optimizers` returns one `Optimizers` for what is two optimizers in torch under Muon; its schedule is a number of
steps, without state of its own. `clip_and_step` is the step: a rank that continued alone would wait for the others for
ever, so whether a gradient is finite is decided by all ranks of the parameters' meshes together.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rl_backends.errors import CheckpointError, ModelError, NonFiniteGradientError
from rl_backends.optimizers.config import OptimizerConfig
from rl_parallel_plans import (
    NamedShard,
    Pipeline,
    clip_grad_by_total_norm_,
    get_grad_norm,
    named_shards,
    to_local_if_dtensor,
)
from rl_parallel_plans.checkpoints import reshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def learning_rate_factor(index: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """The share of `lr` that step `index` (from 0) of `num_steps` uses.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.0)
    >>> [learning_rate_factor(index, config, num_steps=7) for index in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    >>> config = OptimizerConfig(lr=1.0, schedule="wsd", decay_steps=2, final_lr_ratio=0.0)
    >>> [learning_rate_factor(index, config, num_steps=5) for index in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    >>> config = OptimizerConfig(lr=1.0, warmup_steps=4, warmup_start_ratio=0.2)
    >>> [round(learning_rate_factor(index, config, num_steps=6), 2) for index in range(6)]
    [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    """
    if index < config.warmup_steps:
        start = config.warmup_start_ratio
        return start + (1.0 - start) * index / config.warmup_steps if start else (index + 1) / config.warmup_steps
    progress = min(1.0, (index - config.warmup_steps) / max(1, num_steps - config.warmup_steps - 1))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - config.final_lr_ratio) * progress
        case "cosine":
            return config.final_lr_ratio + (1.0 - config.final_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
        case "wsd":
            last = config.decay_steps or 1
            decayed = min(1.0, max(0, index - (num_steps - last) + 1) / last)
            return 1.0 - (1.0 - config.final_lr_ratio) * decayed


# ---- Which parameters are treated alike: by names, shapes and module classes.
#
# Groups are split by mesh because torch's fused and foreach kernels take the tensors of one mesh at a time.

_NO_MATRICES = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that one optimizer treats alike."""

    trained_by: Literal["adamw", "muon"]
    """Muon takes the matrices inside layers, where it was asked for; AdamW everything else."""
    decays: bool
    """Whether weight decay pulls them towards 0."""
    shards: tuple[NamedShard, ...]
    """What this rank holds of each, a tied one under its first name."""

    def for_torch(self, config: OptimizerConfig) -> dict[str, Any]:
        """The group as torch's optimizers take it."""
        decay = config.weight_decay if self.decays else 0.0
        return {"params": [each.tensor for each in self.shards], "weight_decay": decay}


def group_parameters(model: nn.Module, config: OptimizerConfig) -> tuple[ParameterGroup, ...]:
    """The groups of every trainable parameter of `model`, sharded or not, in the model's order.

    Raises:
        ModelError: nothing is trainable.
        ValueError: a pattern of `no_decay` matches no trainable parameter.
    """
    shards = [each for each in named_shards(model) if isinstance(each.tensor, nn.Parameter)]
    trainable = [each for each in shards if each.tensor.requires_grad]
    if not trainable:
        raise ModelError(
            f"none of the {len(shards)} parameters of {type(model).__name__} requires a gradient, so there is nothing "
            "to optimize: unfreeze some, or add adapters"
        )
    names = [each.name for each in trainable]
    for pattern in config.no_decay:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"no_decay pattern {pattern!r} matches none of the {len(names)} trainable parameters "
                f"({', '.join(names[:3])}, ...): `*` stands for anything, and a tied parameter has its first name only"
            )
    owners: dict[int, nn.Module] = {}  # the first module that holds each parameter
    layered: set[int] = set()  # parameters inside a list of modules, as decoder layers and experts are
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), module)
        if isinstance(module, nn.ModuleList):
            layered |= {id(parameter) for parameter in module.parameters()}
    members: dict[tuple[bool, bool, object], list[NamedShard]] = {}
    for each in trainable:
        owner = owners[id(each.tensor)]
        # Norms and biases of several heads or experts are stacks of vectors: two dims, and still no matrix.
        is_norm = "norm" in type(owner).__name__.lower()
        vector = is_norm or len(each.shape) < 2 or each.name.rpartition(".")[2].endswith("bias")
        left_out = any(fnmatchcase(each.name, pattern) for pattern in config.no_decay)
        decays = not left_out and (config.decay_vectors or not vector)
        # A linear map, or a stack of them, one for each expert; not a table of vectors and not a convolution.
        matrix = not vector and not isinstance(owner, _NO_MATRICES) and len(each.shape) in {2, 3}
        by_muon = config.name == "muon" and id(each.tensor) in layered and matrix
        key = (by_muon, decays, getattr(each.tensor, "device_mesh", None))
        members.setdefault(key, []).append(each)
    return tuple(
        ParameterGroup(trained_by="muon" if by_muon else "adamw", decays=decays, shards=tuple(group))
        for (by_muon, decays, _), group in members.items()
    )


# ---- The optimizers.


def make_optimizers(model: nn.Module, config: OptimizerConfig, *, num_steps: int) -> "Optimizers":
    """Optimizers over the trainable parameters of `model`, plain or sharded, for a stage of `num_steps` steps.

    Make them after the model was sharded and moved to its device. No collective.

    Raises:
        ModelError: nothing is trainable.
        ValueError: the schedule does not fit into `num_steps`; a pattern of `no_decay` matches nothing; Muon is left
            without a matrix; torch has no such implementation for these parameters.
        ImportError: `adamw_8bit` without torchao.
    """
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
        from rl_backends.optimizers.muon import Muon

        fused = [each for group in by_muon for each in group.shards if each.row_order is not None]
        muon = Muon(
            [group.for_torch(config) for group in by_muon],
            row_dims={id(each.tensor): each.row_order.dim for each in fused if each.row_order is not None},
            lr=config.lr,
            momentum=config.muon.momentum,
            nesterov=config.muon.nesterov,
            adjust_lr_fn=config.muon.adjust_lr_fn,
            dtype=getattr(torch, config.muon.dtype),
        )
        optimizers.append((muon, 1.0))
    if by_adamw:
        ratio = config.muon.adamw_lr_ratio if config.name == "muon" else 1.0
        optimizers.append((_make_adamw(by_adamw, config, lr=config.lr * ratio), ratio))
    return Optimizers(optimizers, groups, config, num_steps=num_steps)


class StageOptimizers(ABC):
    """The optimizers of a stage, and how many of its steps were taken: all the state that a schedule has."""

    def __init__(self, config: OptimizerConfig, *, num_steps: int) -> None:
        if config.warmup_steps >= num_steps:
            raise ValueError(
                f"warmup_steps={config.warmup_steps} must be less than the {num_steps} steps of the stage, or the "
                f"learning rate never reaches lr={config.lr}"
            )
        if config.warmup_steps + (config.decay_steps or 0) > num_steps:
            raise ValueError(
                f"warmup_steps={config.warmup_steps} and decay_steps={config.decay_steps} together must be at most the "
                f"{num_steps} steps of the stage, or the learning rate goes down before it is up"
            )
        self.config = config
        """Of the optimizers, of the schedule, and of the gradient step."""
        self.num_steps_taken = 0
        """Steps since the stage began, without those left out for a gradient that was not finite."""
        self.num_steps_skipped = 0
        """Steps that were left out: the gradient was not finite, or nothing was trainable."""
        self._num_steps = num_steps

    @property
    @abstractmethod
    def each(self) -> tuple[torch.optim.Optimizer, ...]:
        """Torch's optimizers, for whatever keeps their state. Their learning rate is set anew by every step."""

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.config.lr * learning_rate_factor(self.num_steps_taken, self.config, num_steps=self._num_steps)

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget every gradient, also what microbatches have summed up."""

    @abstractmethod
    def explain(self) -> str:
        """The optimizer, its schedule, and a line for each group of parameters."""

    def schedule_state(self) -> dict[str, int]:
        """How far the schedule has come; JSON can hold it."""
        return {"num_steps_taken": self.num_steps_taken, "num_steps_skipped": self.num_steps_skipped}

    def load_schedule_state(self, state: Mapping[str, int]) -> None:
        """Go on where `schedule_state` was taken, along this stage's own schedule.

        Raises:
            CheckpointError: the state is not one, or the stage is over by then.
        """
        names = list(self.schedule_state())
        if set(state) != set(names) or not all(type(value) is int and value >= 0 for value in state.values()):
            raise CheckpointError(f"{dict(state)} is no state of a schedule, which has {names}, all >= 0")
        if state["num_steps_taken"] > self._num_steps:
            raise CheckpointError(
                f"the checkpoint has taken {state['num_steps_taken']} steps, and this stage has {self._num_steps}: "
                "start it with as many steps as it had, or more"
            )
        self.num_steps_taken = state["num_steps_taken"]
        self.num_steps_skipped = state["num_steps_skipped"]


@final
class Optimizers(StageOptimizers):
    """What `make_optimizers` made: one or two torch optimizers, and the learning rate of the next step."""

    def __init__(
        self,
        optimizers: Sequence[tuple[torch.optim.Optimizer, float]],
        groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        *,
        num_steps: int,
    ) -> None:
        super().__init__(config, num_steps=num_steps)
        self.groups: tuple[ParameterGroup, ...] = tuple(groups)
        """Every trainable parameter, once."""
        self.named_parameters: dict[str, Tensor] = {each.name: each.tensor for group in groups for each in group.shards}
        """Every trainable parameter by its name in the unsharded model: this rank's shards, also while gathered."""
        self._optimizers = optimizers

    @property
    def each(self) -> tuple[torch.optim.Optimizer, ...]:  # noqa: D102
        return tuple(optimizer for optimizer, _ in self._optimizers)

    def step(self) -> None:
        """Update every parameter that has a gradient, with the learning rate of this step."""
        learning_rate = self.learning_rate
        for optimizer, ratio in self._optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(learning_rate * ratio)  # torchao compiles its step with it as an input
                else:
                    group["lr"] = learning_rate * ratio
            optimizer.step()
        self.num_steps_taken += 1

    def zero_grad(self) -> None:  # noqa: D102
        for optimizer in self.each:
            optimizer.zero_grad()

    def explain(self) -> str:  # noqa: D102
        config = self.config
        implementation = f" ({config.implementation})" if config.name == "adamw" else ""
        schedule = explain_schedule(config, num_steps=self._num_steps)
        rows = [["trained by", "weight decay", "parameters", "elements", "such as"]]
        rows += [
            [
                NAMES["adamw" if group.trained_by == "adamw" and config.name == "muon" else config.name],
                f"{config.weight_decay:g}" if group.decays else "none",
                f"{len(group.shards):,}",
                f"{sum(math.prod(each.tensor.shape) for each in group.shards):,}",
                group.shards[0].name,
            ]
            for group in self.groups
        ]
        return "\n".join([f"{NAMES[config.name]}{implementation}, lr={config.lr}, {schedule}", *table(rows)])


NAMES = {"adamw": "AdamW", "adamw_8bit": "AdamW in 8 bits", "muon": "Muon"}


def explain_schedule(config: OptimizerConfig, *, num_steps: int) -> str:
    """The learning rate of `num_steps` steps in words, from warm-up to end."""
    parts = [f"{config.warmup_steps} steps of warm-up"] if config.warmup_steps else []
    if config.schedule == "constant" or config.final_lr_ratio == 1.0:
        parts.append("constant")
    elif config.schedule == "wsd":
        parts.append(f"stable, over the last {config.decay_steps} steps down to {config.lr * config.final_lr_ratio:g}")
    else:
        parts.append(f"{config.schedule} to {config.lr * config.final_lr_ratio:g}")
    return f"{', then '.join(parts)}, {num_steps} steps in all"


def table(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows of cells as lines with aligned columns.

    right: of numbers, so that all columns but the first are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if right and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _make_adamw(groups: Sequence[ParameterGroup], config: OptimizerConfig, *, lr: float) -> torch.optim.Optimizer:
    parts = [group.for_torch(config) for group in groups]
    if config.name == "adamw_8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ImportError(
                f"the optimizer 'adamw_8bit' is torchao's, which cannot be imported here ({error}): "
                "pip install 'rl-backends[8bit]'"
            ) from error
        # Moments of a local shard are quantized in blocks of 256 (arXiv:2110.02861); those of one that is small, or no
        # multiple of a block, are kept in full. torchao compiles its step with torch.compile, once for each shape.
        quantized: torch.optim.Optimizer = AdamW8bit(parts, lr=lr, betas=config.betas, eps=config.eps, block_size=256)
        return quantized
    implementation: dict[str, Any] = {
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    # Ask torch, which otherwise tells at the first step: one step of one element of each kind.
    local = [to_local_if_dtensor(each.tensor) for group in groups for each in group.shards]
    for device, dtype in {(each.device, each.dtype) for each in local}:
        element = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        element.grad = torch.zeros_like(element)
        try:
            AdamW([element], **implementation).step()
        except RuntimeError as error:
            raise ValueError(
                f"torch has no implementation={config.implementation!r} of AdamW for {dtype} on {device} ({error}): "
                "take 'foreach' or 'for-loop'"
            ) from error
    return AdamW(parts, lr=lr, betas=config.betas, eps=config.eps, **implementation)


def _sum_over_ranks(counts: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The sum over all ranks of the meshes that the parameters lie on; a rank may count more than once."""
    meshes: dict[DeviceMesh, None] = {each.device_mesh: None for each in parameters if isinstance(each, DTensor)}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for mesh in meshes:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    if not groups:
        return counts
    device = next(iter(meshes)).device_type
    total = counts.to(device, copy=True)
    for group in groups.values():
        dist.all_reduce(total, group=group)
    return total.to(counts.device)


NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStep:
    """What one step did."""

    norm: float
    """Global 2-norm of the gradient before clipping."""
    clipped: bool
    """Whether the gradient was scaled down to `max_grad_norm`."""
    skipped: bool
    """Whether nothing was updated: the gradient was not finite, or nothing was trainable."""
    nonfinite: tuple[str, ...] = ()
    """The first five parameters whose gradient was not finite; none where only the norm overflowed."""


def clip_and_step(
    model: nn.Module, optimizers: Optimizers, *, version: int, pipeline: Pipeline | None = None
) -> GradientStep:
    """Clip the gradient by its global norm, update the weights, clear the gradient; every rank must call it.

    version: steps that the weights have seen, for the message.
    pipeline: whose stage the model is; the norm is then that of all stages.

    Raises:
        NonFiniteGradientError: the norm is not finite on some rank and `on_nonfinite_gradient` is "raise". Weights and
            optimizers are as they were, and the gradient is cleared.
        RuntimeError: there is no gradient.
    """
    reshard(model)  # what a forward without a backward has left gathered would outlive this step
    parameters = optimizers.named_parameters.values()
    if all(each.grad is None for each in parameters):
        raise RuntimeError("there is no gradient to step along; call forward_backward(examples, loss) first")

    # Ranks reduce the same norm from their own copies of what is replicated, and copies can differ by a fault: all
    # agree on whether it is finite. This waits for the device, once.
    total = get_grad_norm(parameters) if pipeline is None else pipeline.grad_norm()
    failed = _sum_over_ranks((~torch.isfinite(total)).to(torch.float64), parameters)
    if pipeline is not None:
        dist.all_reduce(failed, group=pipeline.group)
    norm, failures = torch.stack([total.to(torch.float64), failed]).tolist()
    if failures:
        named = optimizers.named_parameters
        flags = [
            torch.tensor(each.grad is not None and not bool(torch.isfinite(to_local_if_dtensor(each.grad)).all()))
            for each in parameters
        ]
        wrong = _sum_over_ranks(torch.stack(flags).to(torch.float64), parameters).tolist()
        names = tuple(name for name, count in zip(named, wrong, strict=True) if count)
        return nonfinite_step(optimizers, names, norm=norm, version=version)

    max_norm = optimizers.config.max_grad_norm
    clipped = max_norm is not None and norm > max_norm
    if max_norm is not None:
        clip_grad_by_total_norm_(parameters, max_norm, total)
    optimizers.step()
    optimizers.zero_grad()
    return GradientStep(norm=norm, clipped=clipped, skipped=False)


def nonfinite_step(optimizers: StageOptimizers, names: tuple[str, ...], *, norm: float, version: int) -> GradientStep:
    """Clear a gradient that is not finite, and raise or leave the step out, as the configuration says.

    names: of the parameters whose gradient is not; version: steps before this one.
    """
    optimizers.zero_grad()
    if optimizers.config.on_nonfinite_gradient == "raise":
        some = f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"
        where = f"in {len(names)} parameters ({some})" if names else "in the norm alone and in no parameter"
        raise NonFiniteGradientError(
            f"the gradient norm of step {version + 1} is {norm}: the loss has a NaN or an overflow, {where}. The "
            f"weights are as they were after step {version}; look at the rewards and the learning rate"
        )
    optimizers.num_steps_skipped += 1
    return GradientStep(norm=norm, clipped=False, skipped=True, nonfinite=names[:NAMED])
