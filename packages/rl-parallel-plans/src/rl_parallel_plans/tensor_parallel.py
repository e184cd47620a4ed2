"""Do to a model what a plan says: shard it over the tp axis of a mesh.

Changes the model in place and returns it; does not move it to a device, load weights or make a process group. Whatever
owns data parallelism (`apply_fsdp`, accelerate, a trainer's own `fully_shard`) comes after it.
"""

from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.expert_parallel import refuse_whole_experts
from rl_parallel_plans.plan import ParallelPlan
from rl_parallel_plans.sharding import shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply_tensor_parallel(
    model: nn.Module, mesh: "DeviceMesh", plan: ParallelPlan, *, tp_axis: str = "tp", src_data_rank: int | None = 0
) -> nn.Module:
    """Shard `model` over the axis `tp_axis` of `mesh` as `plan` says, and keep its tied parameters tied.

    src_data_rank: rank of the tp group (not of the world) whose weights all ranks take. 0 sends every weight from it:
        right where only that rank has loaded them, or others hold other random ones. None sends nothing, and each rank
        cuts its piece from what it holds: for ranks that have all loaded the same checkpoint, and for the meta device.

    At tp=1 the model stays as it is. Raises PlanError where the axis is missing or has another size than the plan's
    tp, and, before any weight is touched, for every problem of the plan with the model.
    """
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is a {type(plan).__name__}: make one with plan_for(model, tp=..., custom=...)")
    if plan.tp == 1 and tp_axis not in (mesh.mesh_dim_names or ()):
        return model
    tp_mesh = submesh(mesh, tp_axis)
    if tp_mesh.size() != plan.tp:
        raise PlanError(
            f"the plan is for tp={plan.tp} and axis {tp_axis!r} of the mesh has {tp_mesh.size()} ranks: call plan_for "
            f"with tp={tp_mesh.size()} or make a mesh whose {tp_axis!r} axis is {plan.tp}"
        )
    plan.check(model)
    refuse_whole_experts(model, plan)
    if plan.tp > 1:
        shard(model, tp_mesh, plan.styles, src_data_rank=src_data_rank)
    return model
