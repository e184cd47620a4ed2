"""The optimizer and its schedule as files, so that training goes on as if it had never stopped. Weights are not here.

Tensors are in safetensors, numbers in JSON; no pickle.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["load_training_state", "save_training_state"]

TENSORS, NUMBERS = "optimizer.safetensors", "optimizer.json"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, *, version: int, folder: Path
) -> None:
    """Gather the state on rank 0 and write it into `folder`, which exists; every rank must call it."""
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        moments: dict[str, dict[str, Tensor]] = cast("Any", state["state"])
        tensors = {f"{name}/{key}": value.contiguous() for name, each in moments.items() for key, value in each.items()}
        save_file(tensors, folder / TENSORS)
        numbers = {"version": version, "param_groups": state["param_groups"], "schedule": schedule.state_dict()}
        (folder / NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")
    dist.barrier()


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, *, folder: Path
) -> int:
    """Put the state in `folder` into a fresh optimizer and schedule of the same recipe; return the version."""
    numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    moments: dict[str, Any] = {}
    for label, tensor in load_file(folder / TENSORS).items():
        name, _, key = label.rpartition("/")
        moments.setdefault(name, {})[key] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} for group in numbers["param_groups"]]  # JSON has no tuples
    set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=WHOLE)
    schedule.load_state_dict(numbers["schedule"])
    return int(numbers["version"])
