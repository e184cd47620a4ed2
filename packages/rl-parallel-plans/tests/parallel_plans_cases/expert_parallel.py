"""Expert parallelism on real ranks, each with tokens of its own, against one process that has them all."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import rl_parallel_plans as plans
from parallel_plans_cases.cases import gradient_errors, total_loss
from parallel_plans_cases.models import tiny, token_ids


def parity(
    architecture, shape, *, sequence_parallel=False, accumulate=1, same_tokens=False, checkpointing=False, **changes
):
    """Mesh (dp, ep, tp): gradients of every parameter, and the norm, against the sum over all rows."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "ep", "tp"))
    dp, ep, tp = shape
    ids = token_ids(2 * dp * ep * accumulate, 7)
    if same_tokens:  # every token goes to the same experts, and some ranks receive none
        ids = ids[:1, :1].expand_as(ids)
    reference, model = tiny(architecture, **changes), tiny(architecture, **changes)
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
