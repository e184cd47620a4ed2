"""What all ranks together hold of a model and its optimizers, without the numbers, in the names of Hugging Face.

A rank of Megatron knows its own layers, experts and ranges alone; a checkpoint must know everything. Optimizers are
described as torch's AdamW is elsewhere, in whichever part and group Megatron keeps a parameter.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from rl_backends.checkpoints.optimizer_state import NOT_RESTORED
from rl_backends.checkpoints.shards import dtype_name
from rl_backends.megatron.checkpoint.masters import Master
from rl_backends.megatron.mapping import HeldTensor
from rl_backends.megatron.optimizer import MegatronOptimizers
from rl_backends.rank_agreement import gather_text, on_every_rank

__all__ = ["ADAMW", "ADAMW_WITH_MASTERS", "MASTER", "Description", "describe", "device_of", "held_with"]

ADAMW = f"{AdamW.__module__}.{AdamW.__qualname__}"
"""What every backend calls it; Transformer Engine's and Apex's compute the same."""
ADAMW_WITH_MASTERS = f"{ADAMW} with float32 masters"
"""The same where the weights lie elsewhere, in 16 bits, and the checkpoint holds the numbers that are stepped."""
MASTER = "master"
"""Their name in a parameter's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Of the model and the optimizers, on all ranks."""

    model: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> [dtype, shape] of each weight as the model holds it."""
    trained: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> options of each weight that an optimizer steps."""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> key -> what the optimizer keeps of it."""
    copies: dict[str, str] = field(default_factory=dict)
    """Name -> dtype of each weight that an optimizer keeps in more digits than the model."""

    def weights(self) -> dict[str, list[Any]]:
        """The model's fingerprint, with the dtypes in which a checkpoint keeps the weights."""
        return {name: [self.copies.get(name, dtype), shape] for name, (dtype, shape) in self.model.items()}

    def optimizers(self, *, masters: bool) -> list[dict[str, Any]]:
        """As `state.json` has them.

        masters: the checkpoint holds what is stepped as state, since it holds no weights.
        """
        masters = masters and bool(self.copies)
        state = self.state
        if masters:
            state = {
                name: {**state.get(name, {}), MASTER: {"dtype": dtype, "sharded": True}}
                for name, dtype in self.copies.items()
            } | {name: values for name, values in state.items() if name not in self.copies}
        kind = ADAMW_WITH_MASTERS if masters else ADAMW
        return [{"kind": kind, "bound_to_mesh": False, "groups": self._groups(), "state": state}]

    def _groups(self) -> list[dict[str, Any]]:
        groups: dict[str, dict[str, Any]] = {}
        for name, options in self.trained.items():
            group = groups.setdefault(json.dumps(options, sort_keys=True), {"names": [], "options": options})
            group["names"].append(name)
        return list(groups.values())


def describe(
    held: Sequence[HeldTensor],
    optimizers: MegatronOptimizers | None,
    masters: Iterable[Master],
    *,
    group: dist.ProcessGroup | None,
) -> Description:
    """What all ranks hold; every rank must call it.

    Raises:
        CheckpointError: another rank could not tell.
    """
    text = on_every_rank(lambda: json.dumps(asdict(_describe(held, optimizers, masters))), group=group)
    found = Description()
    for each in map(json.loads, gather_text(text, group=group)):
        for name, part in each.items():
            getattr(found, name).update(part)
    return found


def device_of(held: Sequence[HeldTensor]) -> str:
    """Type of device that the model lies on."""
    return held[0].parameter.device.type if held else "cpu"


def held_with(held: Sequence[HeldTensor], masters: Iterable[Master]) -> list[tuple[HeldTensor, Master]]:
    """What this rank holds and steps at least one number of, name by name."""
    by_parameter: dict[int, list[HeldTensor]] = {}
    for each in held:
        by_parameter.setdefault(id(each.parameter), []).append(each)
    return [
        (each, master)
        for master in masters
        for each in by_parameter.get(id(master.parameter), [])
        if master.piece(each).boxes
    ]


def _describe(
    held: Sequence[HeldTensor], optimizers: MegatronOptimizers | None, masters: Iterable[Master]
) -> Description:
    own = [each for each in held if not each.duplicate]
    model = {each.name: [dtype_name(each.parameter.dtype), list(each.shape)] for each in own}
    if optimizers is None:
        return Description(model=model)
    stepped = held_with(own, masters)
    return Description(
        model=model,
        trained={each.name: _options(optimizers, master.group) for each, master in stepped},
        state={
            each.name: {key: _specification(value) for key, value in state.items()}
            for each, master in stepped
            if (state := master.state())
        },
        copies={each.name: dtype_name(master.tensor.dtype) for each, master in stepped if master.is_copy},
    )


def _options(optimizers: MegatronOptimizers, group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of torch's AdamW, of which Megatron does not use all, and has others that are its own affair.

    Weight decay is that of the settings, also where a schedule is changing it.
    """
    adam = optimizers.adam
    standard = AdamW([nn.Parameter(torch.zeros(()))], betas=adam.betas, eps=adam.eps).param_groups[0]
    options = {key: value for key, value in standard.items() if key not in NOT_RESTORED}
    return {**options, "lr": float(group["lr"]), "weight_decay": adam.weight_decay * group["wd_mult"]}


def _specification(value: Tensor) -> dict[str, Any]:
    return {"dtype": dtype_name(value.dtype), "sharded": value.ndim > 0}
