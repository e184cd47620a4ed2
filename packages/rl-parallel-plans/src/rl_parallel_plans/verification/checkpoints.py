"""The weights of the sharded model, saved and loaded by every road that torch has, beside those of the unsharded one.

Whatever differs in a bit, is missing or has another name is told by its name. Needs a folder that all ranks see.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.verification.question import Question
from rl_parallel_plans.verification.sharded import shard

State = Mapping[str, Tensor]


def round_trip(question: Question, model: nn.Module) -> dict[str, Any]:
    """Each road to the names that came out otherwise; collective. The folder is made by rank 0 and removed."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    truth = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sharded = copy.deepcopy(model)
    shard(question, sharded)
    folder = _common_folder()
    options = StateDictOptions(full_state_dict=True)
    full: dict[str, Any] = {}

    def full_state_dict() -> State:
        # What every rank holds whole comes as the model's own memory, which the other roads empty.
        found: dict[str, Any] = get_model_state_dict(sharded, options=options)
        full.update({name: tensor.clone() for name, tensor in found.items()})
        return full

    def into_unsharded() -> State:
        save({"model": sharded.state_dict()}, checkpoint_id=folder)
        state = {"model": _emptied(copy.deepcopy(model)).state_dict()}
        load(state, checkpoint_id=folder, no_dist=True)
        return state["model"]

    def into(other: nn.Module) -> State:
        state = {"model": _emptied(other).state_dict()}
        load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        return _exported(other)

    def from_full() -> State:
        set_model_state_dict(_emptied(sharded), dict(full), options=options)
        return _exported(sharded)

    roads: dict[str, Callable[[], State]] = {
        "full state dict": full_state_dict,
        "distributed checkpoint, into the unsharded model": into_unsharded,
        "distributed checkpoint, into the same layout": lambda: into(sharded),
        "full state dict, into the same layout": from_full,
    }
    if (fully_sharded := _over_all_ranks(question, model)) is not None:
        roads["distributed checkpoint, into FSDP without tp"] = lambda: into(fully_sharded)
    try:
        return {"roads": {road: _different(take, truth) for road, take in roads.items()}}
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _different(take: Callable[[], State], truth: State) -> list[str]:
    try:
        found = take()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return [f"it raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    names = [f"{name}: not in the checkpoint" for name in truth if name not in found]
    names += [f"{name}: not in the model" for name in found if name not in truth]
    both = [name for name in found if name in truth]
    return names + [f"{name}: other numbers" for name in both if not torch.equal(found[name], truth[name])]


def _exported(model: nn.Module) -> State:
    from rl_parallel_plans.checkpoints import export_state_dict

    return dict(export_state_dict(model, every_rank=True, tied_names=True))


@torch.no_grad()
def _emptied(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.zero_()
    return model


def _over_all_ranks(question: Question, model: nn.Module) -> nn.Module | None:
    """A copy under FSDP alone; None where FSDP does not take it, or it is the layout itself."""
    from torch.distributed.device_mesh import init_device_mesh

    from rl_parallel_plans.sharding.fsdp import apply_fsdp

    if question.tp == 1:
        return None
    try:
        return apply_fsdp(copy.deepcopy(model), init_device_mesh("cpu", (question.world,), mesh_dim_names=("dp",)))
    except PlanError:
        return None


def _common_folder() -> str:
    folder = [tempfile.mkdtemp(prefix="verify-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    assert folder[0] is not None
    return folder[0]
