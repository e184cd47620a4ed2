"""What one rank does in the tests of export: a sharded model's state dict beside the unsharded one's."""

import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import rl_parallel_plans as plans
from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans.checkpoints import export_state_dict
from rl_parallel_plans.sharding.fsdp import apply_fsdp
from rl_parallel_plans.sharding.parallelize import parallelize


def sharded(architecture, *, tied=False, **options):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tiny(architecture, tied=tied)
    return parallelize(model, mesh, plans.plan_for(model, tp=2), **options)


def differences(found, model):
    """Names that one has and the other has not, and names under which they differ in a bit."""
    truth = model.state_dict()
    return sorted(found.keys() ^ truth.keys()) + [
        name for name in found.keys() & truth.keys() if not torch.equal(found[name], truth[name])
    ]


def round_trip(architecture, folder, *, tied=False, offload=False):
    """Export, write with safetensors, load with from_pretrained, compare logits with those of the unsharded model."""
    offload_policy = CPUOffloadPolicy(pin_memory=False) if offload else None
    model = sharded(architecture, tied=tied, offload_policy=offload_policy, activation_checkpointing="full")
    found = dict(export_state_dict(model))
    if dist.get_rank():
        return {"found": list(found)}
    reference = tiny(architecture, tied=tied).eval()
    reference.config.save_pretrained(folder)
    save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(reference).from_pretrained(folder, output_loading_info=True)
    ids = token_ids(2, 9)
    return {
        "differences": [name for name in differences(found, reference) if not (tied and name == "lm_head.weight")],
        "missing": sorted(report["missing_keys"]) + sorted(report["unexpected_keys"]),
        "equal": torch.equal(loaded.eval()(input_ids=ids).logits, reference(input_ids=ids).logits),
    }


def saved_by_transformers(architecture, folder):
    """The names that a checkpoint on disk has, where those in memory are others."""
    found = dict(export_state_dict(sharded(architecture)))
    if dist.get_rank():
        return None
    reference = tiny(architecture).eval()
    reference.save_pretrained(folder, state_dict=found)
    loaded = type(reference).from_pretrained(folder).eval()
    ids = token_ids(2, 9)
    return torch.equal(loaded(input_ids=ids).logits, reference(input_ids=ids).logits)


def options():
    model = sharded("llama", tied=True)
    half = dict(export_state_dict(model, every_rank=True, dtype=torch.bfloat16))
    truth = tiny("llama", tied=True)
    return {
        "ties": [
            "lm_head.weight" in dict(export_state_dict(model, every_rank=True, tied_names=t)) for t in (False, True)
        ],
        "all_names": differences(dict(export_state_dict(model, every_rank=True, tied_names=True)), truth),
        "half": all(torch.equal(half[name], p.bfloat16()) for name, p in truth.named_parameters()),
        "yielded": len(list(export_state_dict(model))),
    }


def after_a_forward_in_half_precision():
    """FSDP leaves the last unit gathered, in the dtype of the forward, until a backward."""
    model = sharded("llama", param_dtype=torch.bfloat16)
    with torch.no_grad():
        model(input_ids=token_ids(2, 5))
    return differences(dict(export_state_dict(model, every_rank=True)), tiny("llama"))


def one_at_a_time():
    """How many earlier tensors are alive at most when the next one arrives."""
    model, alive, most, until = sharded("llama"), [], 0, time.monotonic() + 60
    for _, tensor in export_state_dict(model, every_rank=True):
        while any(reference() is not None for reference in alive) and time.monotonic() < until:
            time.sleep(0.01)  # gloo's thread may hold what it has sent a moment longer
        most = max(most, sum(reference() is not None for reference in alive))
        alive.append(weakref.ref(tensor))
        del tensor
    return most


class WithBuffers(nn.Module):
    """Layers in torch's wrappers, buffers that are kept and buffers that are not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(2))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("recomputed", torch.arange(4), persistent=False)


def wrapped():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = WithBuffers()
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    model.layers[1] = checkpoint_wrapper(model.layers[1])
    apply_fsdp(model, mesh)
    found = dict(export_state_dict(model, every_rank=True))
    assert transformers  # imported, and not needed
    return {"names": list(found) == list(truth), "equal": all(torch.equal(found[name], truth[name]) for name in truth)}
