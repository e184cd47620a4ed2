"""Expert parallelism on real ranks, each with tokens of its own, against one process that has them all."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, gradient_errors, total_loss
from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans.plan.parallel_plan import PlanRequest, _own_plan, make_plan


def parity(
    architecture,
    shape,
    *,
    sequence_parallel=False,
    accumulate=1,
    same_tokens=False,
    checkpointing=False,
    own_plan=False,
    **changes,
):
    """Mesh (dp, ep, tp): gradients of every parameter, and the norm, against the sum over all rows."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "ep", "tp"))
    dp, ep, tp = shape
    ids = token_ids(2 * dp * ep * accumulate, 7)
    if same_tokens:  # every token goes to the same experts, and some ranks receive none
        ids = ids[:1, :1].expand_as(ids)
    reference, model = tiny(architecture, **changes), tiny(architecture, **changes)
    if own_plan:  # Hugging Face's, also where the structure has one
        asked = PlanRequest(tp=tp, ep=ep)
        styles, notes = _own_plan(model, asked)
        plan = make_plan(model, styles, asked=asked, source="Hugging Face tp_plan", notes=notes)
    else:
        plan = plans.plan_for(model, tp=tp, ep=ep, sequence_parallel=sequence_parallel)
    plans.parallelize(
        model,
        mesh,
        plan,
        dp_axis=("dp", "ep"),
        activation_checkpointing="full" if checkpointing else None,
    )
    total_loss(reference, ids).backward()
    mine = ids.chunk(dp * ep)[mesh.get_local_rank("dp") * ep + mesh.get_local_rank("ep")]
    for microbatch in mine.chunk(accumulate):
        total_loss(model, microbatch).backward()
    return {
        "gradient_errors": gradient_errors(model, reference),
        "norms": [plans.get_grad_norm(m.parameters()).item() for m in (model, reference)],
    }


def experts_left_whole():
    """Tensor parallelism alone, of a plan that shares out experts."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ep", "tp"))
    model = tiny("qwen3_moe")
    try:
        plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2, ep=2))
    except plans.PlanError as refusal:
        return str(refusal)
    return None


def copied_model(tp):
    """A deep copy, as a reference policy is made: expert-parallel like its original, with weights of its own."""
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("ep", "tp"))
    reference, model = tiny("qwen3_moe"), tiny("qwen3_moe")
    plan = plans.plan_for(model, tp=tp, ep=2)
    plans.apply_expert_parallel(model, mesh, plan)
    plans.apply_tensor_parallel(model, mesh, plan)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = token_ids(4, 7)
    total_loss(reference, ids).backward()
    mine = ids.chunk(2)[mesh.get_local_rank("ep")]
    loss = total_loss(other, mine)
    loss.backward()
    experts = other.model.layers[0].mlp.experts
    return {
        "loss_error": abs(loss.item() / total_loss(reference, mine).item() - 1),
        "gradient_errors": {
            name: error(p.grad, reference.model.layers[0].mlp.experts.get_parameter(name).grad)
            for name, p in experts.named_parameters()
            if name == "down_proj"
        },
        "original_is_untouched": all(p.grad is None for p in model.parameters()),
    }
