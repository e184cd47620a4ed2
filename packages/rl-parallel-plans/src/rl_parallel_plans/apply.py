"""Do to a model what a plan says: tensor parallelism first, then FSDP2 around it.

Both change the model in place and return it. Neither moves it to a device, loads weights or makes a process group.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan import ParallelPlan
from rl_parallel_plans.sharding import shard
from rl_parallel_plans.structure import decoder_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply_tensor_parallel(
    model: nn.Module, mesh: "DeviceMesh", plan: ParallelPlan, *, tp_axis: str = "tp", src_data_rank: int | None = 0
) -> nn.Module:
    """Shard `model` over the axis `tp_axis` of `mesh` as `plan` says, and keep its tied parameters tied.

    src_data_rank: the rank of the tp group whose weights all take; None where every rank holds the same weights
        already, which saves sending them.

    At tp=1 the model stays as it is. Raises PlanError where the axis is missing or has another size than the plan's
    tp, and, before any weight is touched, for every problem of the plan with the model.
    """
    if plan.tp == 1 and tp_axis not in (mesh.mesh_dim_names or ()):
        return model
    tp_mesh = submesh(mesh, tp_axis)
    if tp_mesh.size() != plan.tp:
        raise PlanError(
            f"the plan is for tp={plan.tp} and axis {tp_axis!r} of the mesh has {tp_mesh.size()} ranks: call plan_for "
            f"with tp={tp_mesh.size()} or make a mesh whose {tp_axis!r} axis is {plan.tp}"
        )
    plan.check(model)
    if plan.tp > 1:
        shard(model, tp_mesh, plan.styles, src_data_rank=src_data_rank)
    return model


def apply_fsdp(
    model: nn.Module,
    mesh: "DeviceMesh",
    *,
    dp_axis: str = "dp",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard every parameter over the axis `dp_axis` of `mesh` with FSDP2: each decoder layer a unit, then the rest.

    Gradients are SUMMED over the axis and not averaged, at every size of it: the loss divides by the step's global
    count, and then no result depends on the number of ranks.

    param_dtype: dtype of the gathered parameters, hence of the forward; the sharded ones keep their own.
    reduce_dtype: dtype of the gradient reduction; None reduces in `param_dtype`.
    reshard_after_forward: free a layer's gathered parameters after its forward and gather them again in backward. The
        last unit (embedding, final norm, lm_head) keeps them, since its backward comes first.

    `type(model)` becomes a subclass made by FSDP. Raises PlanError where the axis or the layers cannot be found, or
    the model is under FSDP already.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    dp_mesh = submesh(mesh, dp_axis)
    stack = decoder_layers(model)
    if stack is None:
        raise PlanError(f"{type(model).__name__} holds no nn.ModuleList of layers to shard one by one: use fully_shard")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError(f"{type(model).__name__} is under FSDP already: apply it once")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for layer in stack[1]:
        fully_shard(layer, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A divisor of 1 alone asks the communication library for a scaled sum, which gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def parallelize(
    model: nn.Module,
    mesh: "DeviceMesh",
    plan: ParallelPlan,
    *,
    tp_axis: str = "tp",
    dp_axis: str = "dp",
    src_data_rank: int | None = 0,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """`apply_tensor_parallel`, then `apply_fsdp`, with their arguments and errors.

    `mesh` has the axis `dp_axis`, and `tp_axis` too where `plan.tp` is above 1; an axis of one rank is well.
    """
    submesh(mesh, dp_axis)  # refuse before anything has changed
    apply_tensor_parallel(model, mesh, plan, tp_axis=tp_axis, src_data_rank=src_data_rank)
    return apply_fsdp(
        model,
        mesh,
        dp_axis=dp_axis,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
