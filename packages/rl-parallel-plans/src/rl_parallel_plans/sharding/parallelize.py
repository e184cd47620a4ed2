"""Do to a model what training on a mesh needs, in the order that works.

    expert parallelism, tensor parallelism, context parallelism, activation checkpointing, FSDP

`parallelize` does all of it; each function is usable by itself, and a trainer that owns its FSDP (accelerate, its own
`fully_shard`) takes all but the last. The model changes in place. Nothing here moves it to a device, loads weights or
makes a process group.

The ep axis is data-parallel for everything but experts: each of its ranks has tokens of its own. FSDP takes it among
its axes (`dp_axis=("dp", "ep")`), and leaves the experts to the others.

Parameters that no pattern of a plan names become whole DTensors too, so that everything is on one mesh: optimizers
that fuse parameters, and torch's own gradient norm, take no mixture.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_parallel_plans.context_parallel.apply import apply_context_parallel
from rl_parallel_plans.dtensor import is_dtensor, submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan.parallel_plan import ParallelPlan
from rl_parallel_plans.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from rl_parallel_plans.sharding.fsdp import (
    FP32_PARAMETERS,
    apply_fsdp,
    check_tokens_are_summed,
    fsdp_layout,
    kept_in_fp32,
)
from rl_parallel_plans.structure import matching_modules, retie, tied_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

    from rl_parallel_plans.styles.table import LocalView


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
    """Apply the functions `apply_*` to `model` in the order that works, each where it is asked for.

    Their arguments and errors are the same here. What FSDP would refuse is refused before anything has changed.

    `mesh` has the axes `dp_axis`, and `tp_axis` too where `plan.tp` is above 1; an axis may have one rank. Axes whose
    ranks have tokens of their own are data-parallel too: with experts over "ep", or rows over "cp", `dp_axis` is
    `("dp", "ep")` or `("dp", "cp")`.

    cp_axis: axis that rows are cut over; None cuts none.
    """
    _require_plan(plan)
    if cp_axis is not None and submesh(mesh, cp_axis).size() > 1:
        axes = (dp_axis,) if isinstance(dp_axis, str) else tuple(dp_axis)
        check_tokens_are_summed(cp_axis, axes, dp_replicate_axis)
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


def _require_plan(plan: object) -> None:
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is a {type(plan).__name__}: make one with plan_for(model, tp=..., custom=...)")


def apply_expert_parallel(
    model: nn.Module,
    mesh: "DeviceMesh",
    plan: ParallelPlan,
    *,
    ep_axis: str = "ep",
    tp_axis: str = "tp",
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Share out the experts of `model` over `ep_axis` of `mesh`, and each of them over `tp_axis` where plan.tp > 1.

    Comes before `apply_tensor_parallel`. Each rank of the ep axis must get tokens of its own. At ep=1 nothing changes.
    src_data_rank: as of `apply_tensor_parallel`, of the ranks that share the experts.

    Raises PlanError where an axis is missing or has another size than the plan's, and for every problem of the plan.
    """
    if plan.asked.ep == 1:
        return model
    ep_mesh = submesh(mesh, ep_axis)
    if ep_mesh.size() != plan.asked.ep:
        raise PlanError(
            f"the plan is for ep={plan.asked.ep} and axis {ep_axis!r} of the mesh has {ep_mesh.size()} ranks"
        )
    if plan.tp > 1:
        submesh(mesh, tp_axis)
        ep_mesh = mesh[ep_axis, tp_axis]
    plan.check(model)
    for style, module in experts_of(model, plan):
        style.src_data_rank = src_data_rank
        style._apply(module, ep_mesh)  # noqa: SLF001 - how torch applies a style; parallelize_module takes one axis only
    return model


def experts_of(model: nn.Module, plan: ParallelPlan) -> "list[tuple[ParallelStyle, nn.Module]]":
    """The modules of stacked experts that the plan shares out, each with its style."""
    if plan.asked.ep == 1:
        return []
    from rl_parallel_plans.styles.expert_dispatch import ExpertParallel

    return [
        (style, module)
        for pattern, style in plan.styles.items()
        if isinstance(style, ExpertParallel)
        for _, module in matching_modules(model, pattern)
    ]


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
    from torch.distributed.tensor.parallel import parallelize_module

    _require_plan(plan)
    if plan.tp == 1 and tp_axis not in (mesh.mesh_dim_names or ()):
        return model
    tp_mesh = submesh(mesh, tp_axis)
    if tp_mesh.size() != plan.tp:
        raise PlanError(
            f"the plan is for tp={plan.tp} and axis {tp_axis!r} of the mesh has {tp_mesh.size()} ranks: call plan_for "
            f"with tp={tp_mesh.size()} or make a mesh whose {tp_axis!r} axis is {plan.tp}"
        )
    plan.check(model)
    if any(not is_dtensor(p) for _, module in experts_of(model, plan) for p in module.parameters(recurse=False)):
        raise PlanError(
            f"the plan is for ep={plan.asked.ep} and the experts are whole: call apply_expert_parallel first, or "
            "parallelize, which does both"
        )
    if plan.tp == 1:
        return model
    ties = tied_names(model)
    if any("experts" in pattern and getattr(style, "in_block", False) for pattern, style in plan.styles.items()):
        model.register_forward_pre_hook(_refuse_router_loss, with_kwargs=True)
    for pattern, style in plan.styles.items():
        for _, module in matching_modules(model, pattern):
            if getattr(style, "ep", 1) == 1:  # experts that are shared out over another axis are sharded already
                parallelize_module(module, tp_mesh, style, src_data_rank=src_data_rank)
    # Each end of a tie was sharded by itself and is a parameter of its own until here.
    retie(model, ties)
    _replicate_the_rest(model, tp_mesh, src_data_rank=src_data_rank)
    retie(model, ties)
    return model


def _refuse_router_loss(model: nn.Module, _args: object, kwargs: dict[str, object]) -> None:
    """A router in a block gets the sum of all ranks' gradients: those of an auxiliary loss would count tp times."""
    config = getattr(model, "config", None)
    if kwargs.get("output_router_logits") or getattr(config, "output_router_logits", False):
        raise PlanError(
            "output_router_logits is True: under a plan by structure the gradient of an auxiliary loss of the router "
            "would be counted once per tp rank; pass False"
        )


def _replicate_the_rest(model: nn.Module, tp_mesh: "DeviceMesh", *, src_data_rank: int | None) -> None:
    from rl_parallel_plans.styles.table import REPLICATED, compute_locally, local_views, place_parameters

    rest: dict[str, tuple[nn.Module, list[str]]] = {}
    for path, module in model.named_modules():
        names = [name for name, p in module.named_parameters(recurse=False) if not is_dtensor(p)]
        if names:
            rest[path] = (module, names)
    views: dict[str, tuple[nn.Module, tuple[LocalView, ...]]] = {}
    for path, (module, names) in rest.items():
        rules = dict.fromkeys(names, REPLICATED)
        place_parameters(module, tp_mesh, rules, src_data_rank=src_data_rank)
        views[path] = (module, local_views(tp_mesh, rules))
    # A parent may read a child's weight without calling the child (interpolated position embeddings, a router): the
    # parent itself, where FSDP may have gathered it, or the model.
    parents = {path.rpartition(".")[0] for path in rest if path}
    for parent in sorted(parents - {""}):
        children = [each for path, each in views.items() if path and path.rpartition(".")[0] == parent]
        compute_locally(model.get_submodule(parent), children)
    if rest:
        compute_locally(model, list(views.values()))
