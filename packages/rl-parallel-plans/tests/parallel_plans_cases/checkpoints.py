"""What one rank does in the tests of checkpoints: save a sharded model and load it, every way, and compare the bits."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import rl_parallel_plans as plans
from parallel_plans_cases import hybrids, models
from parallel_plans_cases.cases import total_loss
from parallel_plans_cases.models import token_ids
from rl_parallel_plans.checkpoints import row_orders
from rl_parallel_plans.styles.fused_weights import FusedTensor

FULL = StateDictOptions(full_state_dict=True)


def built(architecture, **changes):
    return (models if architecture in models.ARCHITECTURES else hybrids).tiny(architecture, **changes)


def sharded(architecture, shape, **changes):
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp"))
    model = built(architecture, **changes)
    return plans.parallelize(model, mesh, plans.plan_for(model, tp=shape[1]))


def different(found, truth):
    """Names that are not on both sides, and those under which a bit differs."""
    return sorted(found.keys() ^ truth.keys()) + [
        n for n in found if n in truth and not torch.equal(found[n], truth[n])
    ]


@torch.no_grad()
def emptied(model):
    for parameter in model.parameters():
        parameter.zero_()
    return model


def everywhere(architecture, shape, layouts, folder, **changes):
    """The weights of a model that is sharded over `shape`, by every road that torch has to somewhere else."""
    truth = built(architecture, **changes).state_dict()
    model = sharded(architecture, shape, **changes)
    fused = sum(len(row_orders(module)) for module in model.modules())
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
    found = {"fused": fused}
    plain = {"model": emptied(built(architecture, **changes)).state_dict()}
    dcp.load(plain, checkpoint_id=f"{folder}/dcp", no_dist=True)
    found["dcp, plain"] = different(plain["model"], truth)
    if dist.get_rank() == 0:
        dcp_to_torch_save(f"{folder}/dcp", f"{folder}/one.pt")
        found["dcp_to_torch"] = different(torch.load(f"{folder}/one.pt")["model"], truth)
    full = get_model_state_dict(model, options=FULL)
    found["full state dict"] = different(full, truth)
    found["full_tensor of each"] = different(
        {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}, truth
    )
    for layout in (shape, *layouts):
        other = emptied(sharded(architecture, layout, **changes))
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        other.load_state_dict(state["model"])
        found[f"dcp, {layout}"] = different(
            dict(plans.export_state_dict(other, every_rank=True, tied_names=True)), truth
        )
        emptied(other)
        set_model_state_dict(other, dict(full), options=FULL)
        found[f"set full, {layout}"] = different(
            dict(plans.export_state_dict(other, every_rank=True, tied_names=True)), truth
        )
    emptied(other)
    state = {n: _native(full[n], other) if isinstance(t, FusedTensor) else t for n, t in state["model"].items()}
    dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")  # the others, which lie in the model's memory
    other.load_state_dict(state)
    found["DTensors of another placement"] = different(
        dict(plans.export_state_dict(other, every_rank=True, tied_names=True)), truth
    )
    reference = built(architecture, **changes)
    if dist.get_rank() == 0:
        reference.save_pretrained(f"{folder}/hf", state_dict=full)
        loaded = type(reference).from_pretrained(f"{folder}/hf", dtype=next(reference.parameters()).dtype)
        found["save_pretrained"] = different(loaded.state_dict(), truth)
    return found


def _native(tensor, model):
    """Whole on every rank, as a DTensor on the model's mesh."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = next(model.parameters()).device_mesh
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


def optimizer_state(architecture, shape, other_shape, folder):
    """Moments come back at the same layout; at another tp and in a plain model they are refused by name."""
    model = sharded(architecture, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total_loss(model, token_ids(2, 6)).backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=f"{folder}/dcp")
    again = sharded(architecture, shape)
    other = torch.optim.AdamW(again.parameters(), lr=1e-3)
    state = {"optimizer": get_optimizer_state_dict(again, other)}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_optimizer_state_dict(again, other, state["optimizer"])
    moments = [
        [o.state[p]["exp_avg"].to_local() for p in m.parameters()] for m, o in ((model, optimizer), (again, other))
    ]
    refusals = []
    for wrong, no_dist in ((sharded(architecture, other_shape), False), (built(architecture), True)):
        their = torch.optim.AdamW(wrong.parameters(), lr=1e-3)
        try:
            dcp.load(
                {"optimizer": get_optimizer_state_dict(wrong, their)}, checkpoint_id=f"{folder}/dcp", no_dist=no_dist
            )
            refusals.append(None)
        except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
            refusals.append(f"{type(error).__name__}: {error}"[:3000])
    return {"same": all(map(torch.equal, *moments)), "refusals": refusals}


def unusual_roads(architecture, folder):
    """Copies of a state dict, an asynchronous save, `copy.deepcopy`, `torch.save`; and what is refused."""
    import copy

    truth = built(architecture).state_dict()
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), built(architecture)
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh.size()))
    state = model.state_dict()
    copies = {
        "clone": {n: t.clone() for n, t in state.items()},
        "detached on cpu": {n: t.detach().to("cpu") for n, t in state.items()},
        "deepcopy": copy.deepcopy(dict(state)),
        "deepcopy of the model": copy.deepcopy(model).state_dict(),
    }
    found = {name: different({n: t.full_tensor() for n, t in copied.items()}, truth) for name, copied in copies.items()}
    half = {n: t.to(torch.bfloat16).full_tensor() for n, t in state.items()}
    found["bfloat16"] = different(half, {n: t.bfloat16() for n, t in truth.items()})
    dcp.async_save({"model": state}, checkpoint_id=f"{folder}/async").result()
    plain = {"model": emptied(built(architecture)).state_dict()}
    dcp.load(plain, checkpoint_id=f"{folder}/async", no_dist=True)
    found["async_save"] = different(plain["model"], truth)
    path = Path(folder) / f"{dist.get_rank()}.pt"
    torch.save(state, path)
    found["torch.save"] = different(
        {n: t.full_tensor() for n, t in torch.load(path, weights_only=False).items()}, truth
    )
    name = next(n for n, t in state.items() if isinstance(t, FusedTensor))
    refused = []
    for compute in (lambda t: t + 1, lambda t: t.redistribute(placements=[]), lambda t: t[:2]):
        try:
            compute(state[name])
            refused.append(None)
        except plans.PlanError as error:
            refused.append(str(error))
    found["computing"] = refused
    found["placements"] = repr(state[name].placements)
    return found
