"""Low-rank adapters in linear layers, on real ranks, against the same model on one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, gradient_errors, total_loss
from parallel_plans_cases.models import tiny, token_ids

RANK = 4


class Adapter(nn.Module):
    """The parts and names of peft's layer, and its arithmetic."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, linear.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 0.5


def adapted(architecture, *, only="", **changes):
    """A tiny model with adapters in its attention, and in every feed-forward block that is no mixture."""
    model = tiny(architecture, **changes).requires_grad_(requires_grad=False)
    torch.manual_seed(3)
    for path, module in list(model.model.layers.named_modules()):
        parent, _, name = path.rpartition(".")
        owner = model.model.layers.get_submodule(parent)
        mixture = "experts" in path.split(".") or hasattr(owner, "experts")
        if isinstance(module, nn.Linear) and not mixture and path.startswith(only):
            setattr(owner, name, Adapter(module))
    return model


def parity(architecture, *, accumulate=1, sequence_parallel=False, checkpointing=False, **changes):
    reference, model = adapted(architecture, **changes), adapted(architecture, **changes)
    ids = token_ids(2 * accumulate, 9)
    total_loss(reference, ids).backward()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    plan = plans.plan_for(model, tp=mesh["tp"].size(), sequence_parallel=sequence_parallel)
    plans.parallelize(model, mesh, plan, activation_checkpointing="full" if checkpointing else None)
    for microbatch in ids.chunk(accumulate):
        total_loss(model, microbatch).backward()
    exported = dict(plans.export_state_dict(model, every_rank=True))
    return {
        "source": plan.source,
        "logits_error": error(model(input_ids=ids).logits, reference(input_ids=ids).logits),
        "gradient_errors": gradient_errors(*map(unwrapped, (model, reference))),
        "norms": [plans.get_grad_norm(m.parameters()).item() for m in (model, reference)],
        "exported": all(torch.equal(exported[name], p) for name, p in reference.named_parameters()),
    }


def unwrapped(model):
    """Without the wrapper that recomputes activations: it changes names."""
    for name, layer in model.model.layers.named_children():
        model.model.layers[int(name)] = getattr(layer, "_checkpoint_wrapped_module", layer)
    return model
