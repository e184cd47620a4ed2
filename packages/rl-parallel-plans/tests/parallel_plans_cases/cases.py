"""What one rank does in each test, and the numbers that it brings back; each also computes the unsharded truth."""

import types

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy

import rl_parallel_plans as plans
from parallel_plans_cases.models import tiny, tiny_on_meta, token_ids
from rl_parallel_plans.checkpoints import row_orders


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total_loss(model, ids):
    """Sum over tokens, so that sums over ranks and microbatches add up to it."""
    logits = whole(model(input_ids=ids).logits)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def error(found, truth, least=0.0):
    """Largest deviation, relative to the largest entry of the truth, which counts as `least` at least."""
    scale = truth.detach().abs().max().clamp(min=least)
    return ((whole(found).detach() - truth.detach()).abs().max() / scale).item()


def gradient_errors(model, reference, share=1e-4):
    """Of each parameter; the size of a gradient counts as `share` of the largest of all at least."""
    truth = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == truth.keys()
    # A gradient that is zero but for rounding (the bias of a key) has no size of its own.
    least = share * max(p.grad.abs().max().item() for p in truth.values() if p.grad is not None)
    return {
        name: error(ordered(model, name, p.grad), truth[name].grad, least)
        for name, p in found.items()
        if both(p, truth[name])
    }


def both(found, truth):
    """Whether there is a gradient; that one side alone has it is an error."""
    assert (found.grad is None) == (truth.grad is None)
    return truth.grad is not None


def ordered(model, name, gradient):
    """Rows of a fused weight in the order of the unsharded model."""
    path, _, parameter = name.rpartition(".")
    order = row_orders(model.get_submodule(path)).get(parameter)
    return gradient if order is None else order.undealt(whole(gradient))


def is_tied(model):
    return model.lm_head.weight is model.model.embed_tokens.weight


def kinds(model):
    """The meshes that parameters lie on, `plain` for none."""
    return sorted(
        {str(p.device_mesh.mesh_dim_names) if isinstance(p, DTensor) else "plain" for p in model.parameters()}
    )


def tp_parity(
    architecture,
    *,
    tied=False,
    length=9,
    accumulate=1,
    checkpointing=False,
    sequence_parallel=False,
    output_projections="rowwise",
    **changes,
):
    ids = token_ids(2 * accumulate, length, changes.get("vocab_size", 128))
    reference = tiny(architecture, tied=tied, **changes)
    total_loss(reference, ids).backward()
    model = tiny(architecture, tied=tied, **changes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = plans.plan_for(
        model, tp=mesh.size(), sequence_parallel=sequence_parallel, output_projections=output_projections
    )
    plans.apply_tensor_parallel(model, mesh, plan)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for microbatch in ids.chunk(accumulate):
        total_loss(model, microbatch).backward()
    logits = model(input_ids=ids).logits
    return {
        "source": plan.source,
        "logits": str(logits.placements),
        "logits_error": error(logits, reference(input_ids=ids).logits),
        "gradient_errors": gradient_errors(model, reference),
        "gradients_placed_otherwise": [
            name
            for name, p in model.named_parameters()
            if p.grad is not None and isinstance(p, DTensor) and p.grad.placements != p.placements
        ],
        "tied": is_tied(model),
        "kinds": kinds(model),
        "local_bytes": sum(plans.to_local_if_dtensor(p).nbytes for p in model.parameters()),
        "planned_bytes": sum(row.rank_bytes for row in plan.parameters),
    }


def src_data_rank_takes_the_weights_of_that_rank():
    """Rank 1 starts from other weights; after sharding, all hold those of rank 0."""
    truth = tiny("qwen3")
    model = tiny("qwen3")
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2))
    parameters = dict(model.named_parameters())
    return max((whole(parameters[name]) - p).abs().max().item() for name, p in truth.named_parameters())


def frozen_parameters_stay_frozen():
    model = tiny("qwen3")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2))
    total_loss(model, token_ids(2, 5)).backward()
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad == ("norm" in name)]


def collectives(architecture="llama", **asked):
    """How often each collective runs in one layer, forward and backward: three layers less two."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    counts = []
    for num_layers in (2, 3):
        model = tiny(architecture, num_hidden_layers=num_layers)
        plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2, **asked))
        with CommDebugMode() as mode:
            total_loss(model, token_ids(2, 5)).backward()
        counts.append(mode.get_total_counts())
    return counts[1] - counts[0]


def exception_in_a_norm_leaves_it_whole():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny("qwen3")
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2))
    norm = model.model.norm
    try:
        norm("no tensor")
    except AttributeError:
        return isinstance(norm.weight, DTensor)
    return False


def mesh_refusals():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny("llama")
    before = {name: id(p) for name, p in model.named_parameters()}
    messages = []
    for tp, axis in ((4, "tp"), (2, "tensor")):
        plan = plans.plan_for(model, tp=tp)
        try:
            plans.apply_tensor_parallel(model, mesh, plan, tp_axis=axis)
        except plans.PlanError as refusal:
            messages.append(str(refusal))
    try:
        plans.parallelize(model, mesh, plans.plan_for(model, tp=2))
    except plans.PlanError as refusal:
        messages.append(str(refusal))
    return [messages, before == {name: id(p) for name, p in model.named_parameters()}]


def applied_twice():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny("llama")
    plan = plans.plan_for(model, tp=2)
    plans.apply_tensor_parallel(model, mesh, plan)
    try:
        plans.apply_tensor_parallel(model, mesh, plan)
    except plans.PlanError as refusal:
        return str(refusal)
    return None


def parallel_parity(
    architecture, shape, *, tied=False, accumulate=1, sync_last_only=False, optimizer_steps=0, sequence_parallel=False
):
    """FSDP and TP together: each dp rank has its rows of the batch, and the gradient is that of the sum over all."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp"))
    dp = mesh.size(0)
    ids = token_ids(2 * dp * accumulate, 7)
    reference = tiny(architecture, tied=tied)
    model = tiny(architecture, tied=tied)
    plans.parallelize(model, mesh, plans.plan_for(model, tp=mesh.size(1), sequence_parallel=sequence_parallel))
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True, weight_decay=0.1) for m in (reference, model)
    ]
    model.logp = types.MethodType(logp_of_tokens, model)
    register_fsdp_forward_method(model, "logp")
    norms = []
    for _ in range(max(1, optimizer_steps)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total_loss(reference, ids).backward()
        microbatches = ids.chunk(dp)[mesh.get_local_rank("dp")].chunk(accumulate)
        for number, microbatch in enumerate(microbatches, 1):
            model.set_requires_gradient_sync(not sync_last_only or number == len(microbatches))
            (-model.logp(microbatch).sum()).backward()
        norms.append([plans.get_grad_norm(m.parameters()).item() for m in (model, reference)])
        errors = gradient_errors(model, reference)
        if optimizer_steps:
            for optimizer in optimizers:
                optimizer.step()
    truth = dict(reference.named_parameters())
    return {
        "gradient_errors": errors,
        "norms": norms,
        "weight_errors": {name: error(p, truth[name]) for name, p in model.named_parameters()},
        "tied": is_tied(model),
        "kinds": kinds(model),
        "class": type(model).__name__,
    }


def logp_of_tokens(self, ids):
    """log p of each token given those before it, without logits: [rows, length - 1]."""
    hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
    logp = plans.linear_logp(hidden.flatten(0, 1), self.lm_head, ids[:, 1:].flatten(), chunk_size=5)
    return logp.view(len(ids), -1)


def one_rank(param_dtype=None):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    ids = token_ids(3, 7)
    reference = tiny("qwen3")
    model = tiny("qwen3")
    plans.parallelize(model, mesh, plans.plan_for(model, tp=1), param_dtype=getattr(torch, param_dtype or "float32"))
    total_loss(reference, ids).backward()
    total_loss(model, ids).backward()
    return {
        "gradient_errors": gradient_errors(model, reference),
        "norms": [plans.get_grad_norm(m.parameters()).item() for m in (model, reference)],
        "dtypes": sorted({str(p.grad.dtype) for p in model.parameters()}),
    }


def model_without_numbers():
    """Sharded on the meta device, given storage after: what loading a large checkpoint does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny_on_meta("qwen3", tie_word_embeddings=True)
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2), src_data_rank=None)
    model.to_empty(device="cpu")
    return [is_tied(model), list(model.model.layers[1].mlp.up_proj.weight.to_local().shape)]
