"""Everything that training on a mesh does to a model, in the order that works.

    expert parallelism, tensor parallelism, context parallelism, activation checkpointing, FSDP

Each is usable by itself; a trainer that owns its FSDP takes all but the last. The model changes in place.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_parallel_plans.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from rl_parallel_plans.context_parallel.apply import apply_context_parallel
from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.expert_parallel import apply_expert_parallel
from rl_parallel_plans.fp32_parameters import FP32_PARAMETERS, kept_in_fp32
from rl_parallel_plans.fsdp import apply_fsdp, check_tokens_are_summed, fsdp_layout
from rl_parallel_plans.plan import ParallelPlan
from rl_parallel_plans.tensor_parallel import apply_tensor_parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy


def parallelize(
    model: nn.Module,
    mesh: "DeviceMesh",
    plan: ParallelPlan,
    *,
    tp_axis: str = "tp",
    ep_axis: str = "ep",
    cp_axis: str | None = None,
    dp_axis: str | tuple[str, ...] = "dp",
    dp_replicate_axis: str | None = None,
    src_data_rank: int | None = 0,
    activation_checkpointing: ActivationCheckpointing | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    fp32_parameters: Sequence[str] = FP32_PARAMETERS,
    offload_policy: "OffloadPolicy | None" = None,
    reshard_after_forward: bool | int = True,
) -> nn.Module:
    """Experts, tensors, rows, recomputed activations and FSDP, each where it is asked for.

    The functions `apply_*` in the order of this file's first lines, with their arguments and errors.

    `mesh` has the axes `dp_axis`, and `tp_axis` too where `plan.tp` is above 1; an axis of one rank is well. Axes whose
    ranks have tokens of their own are data-parallel too: with experts over "ep", or rows over "cp", `dp_axis` is
    `("dp", "ep")` or `("dp", "cp")`. What FSDP would refuse is refused
    before anything has changed.

    cp_axis: axis that rows are cut over; None cuts none.
    """
    _check(mesh, plan, cp_axis=cp_axis, dp_axis=dp_axis, dp_replicate_axis=dp_replicate_axis)
    fsdp_layout(
        model,
        mesh,
        dp_axis=dp_axis,
        dp_replicate_axis=dp_replicate_axis,
        fp32=kept_in_fp32(model, param_dtype, fp32_parameters),
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )
    apply_expert_parallel(model, mesh, plan, ep_axis=ep_axis, tp_axis=tp_axis, src_data_rank=src_data_rank)
    apply_tensor_parallel(model, mesh, plan, tp_axis=tp_axis, src_data_rank=src_data_rank)
    if cp_axis is not None:
        apply_context_parallel(model, mesh, cp_axis=cp_axis, plan=plan)
    if activation_checkpointing is not None:
        apply_activation_checkpointing(model, activation_checkpointing)
    return apply_fsdp(
        model,
        mesh,
        dp_axis=dp_axis,
        dp_replicate_axis=dp_replicate_axis,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        output_dtype=output_dtype,
        fp32_parameters=fp32_parameters,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
    )


def _check(
    mesh: "DeviceMesh",
    plan: ParallelPlan,
    *,
    cp_axis: str | None,
    dp_axis: str | tuple[str, ...],
    dp_replicate_axis: str | None,
) -> None:
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is a {type(plan).__name__}: make one with plan_for(model, tp=..., custom=...)")
    if cp_axis is not None and submesh(mesh, cp_axis).size() > 1:
        axes = (dp_axis,) if isinstance(dp_axis, str) else tuple(dp_axis)
        check_tokens_are_summed(cp_axis, axes, dp_replicate_axis)
