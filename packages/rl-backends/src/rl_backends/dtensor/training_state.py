"""The optimizer and its schedule as files, so that training goes on as if it had never stopped. Weights are not here.

Tensors are in safetensors, numbers in JSON; no pickle.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from rl_backends.dtensor.ranks import on_rank_0

__all__ = ["load_training_state", "save_training_state"]

TENSORS, NUMBERS = "optimizer.safetensors", "optimizer.json"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, *, version: int, folder: Path
) -> None:
    """Gather the state on rank 0 and write it into `folder`, which exists; every rank must call it.

    Raises:
        OSError: it cannot be written; on every rank.
    """
    # Asking torch for the state of an optimizer that has taken no step would take one, and count it.
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE) if optimizer.state else {}
    moments: dict[str, dict[str, Tensor]] = cast("Any", state.get("state", {}))
    tensors = {f"{name}/{key}": value.contiguous() for name, each in moments.items() for key, value in each.items()}
    numbers = {"version": version, "groups": state.get("param_groups", []), "schedule": schedule.state_dict()}

    def write() -> None:
        save_file(tensors, folder / TENSORS)
        (folder / NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")

    on_rank_0(write)


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, *, folder: Path
) -> int:
    """Put the state in `folder` into a fresh optimizer and schedule of the same recipe; return the version."""
    numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    moments: dict[str, Any] = {}
    for label, tensor in load_file(folder / TENSORS).items():
        name, _, key = label.rpartition("/")
        moments.setdefault(name, {})[key] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} for group in numbers["groups"]]  # JSON has no tuples
    if moments:
        set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=WHOLE)
    schedule.load_state_dict(numbers["schedule"])
    return int(numbers["version"])
