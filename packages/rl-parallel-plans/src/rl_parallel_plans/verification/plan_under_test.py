"""The plan that a request asks to verify: what it says about itself, and a model sharded by it."""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_parallel_plans.errors import PlanError, UnusableModelError
from rl_parallel_plans.model_source import build
from rl_parallel_plans.plan.parallel_plan import plan_for
from rl_parallel_plans.structure import matching_modules
from rl_parallel_plans.verification.tasks import Hook, Request

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_parallel_plans.plan.parallel_plan import ParallelPlan


def imported(function: Hook) -> Callable[..., Any]:
    """The function itself, or what its import path names."""
    from rl_parallel_plans.plan.registry import resolve

    result: Any = function if callable(function) else resolve(function)
    return result  # type: ignore[no-any-return]


def plan_of(request: Request, model: nn.Module) -> "ParallelPlan":
    """The plan under test. Raises PlanError if there is none."""
    return plan_for(
        model,
        tp=request.tp,
        sequence_parallel=request.sequence_parallel,
        output_projections=request.output_projections,
        custom=request.custom,
    )


def shard(request: Request, model: nn.Module) -> "DeviceMesh":
    """Shard `model` in place; the mesh has the axes dp and tp, or tp alone where there is one data-parallel rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from rl_parallel_plans.sharding.fsdp import apply_fsdp
    from rl_parallel_plans.sharding.parallelize import apply_tensor_parallel, parallelize

    axes = {"dp": request.dp, "tp": request.tp} if request.dp > 1 else {"tp": request.tp}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if request.apply is not None:
        imported(request.apply)(model, mesh)
    elif not request.check_first:  # as torch's own `parallelize_module` takes a plan: nothing checked, no ties restored
        for pattern, style in plan_of(request, model).styles.items():
            for _, module in matching_modules(model, pattern):
                parallelize_module(module, mesh["tp"], style, src_data_rank=None)
        if request.dp > 1:
            apply_fsdp(model, mesh)
    elif request.dp > 1:
        parallelize(model, mesh, plan_of(request, model), src_data_rank=None)
    else:
        apply_tensor_parallel(model, mesh, plan_of(request, model), src_data_rank=None)
    return mesh


def plan_facts(request: Request, models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What needs no ranks: the plan's source, the collectives it predicts, its fit at full size and of a wrapped class.

    Raises PlanError for a plan with problems, unless the request says to run it anyway.
    """
    if request.apply is not None:
        name = getattr(request.apply, "__qualname__", "function")
        return {"source": f"applied by {request.apply if isinstance(request.apply, str) else name}"}
    plans = {variant: plan_of(request, model) for variant, model in models.items()}
    if request.check_first:
        for variant, plan in plans.items():
            plan.check(models[variant])
    if request.pp > 1:
        from rl_parallel_plans.pipeline.stages import split_stages

        for model in models.values():
            split_stages(model, 2 * request.pp)
    variant, first = next(iter(plans.items()))
    return {
        "source": first.source,
        "predicted": {name: _predicted_collectives(plan, models[name]) for name, plan in plans.items()},
        "wrapped": _differences_when_wrapped(request, models[variant], first) if first.styles else None,
        "full_size": None if request.full is None else _problems_at_full_size(request),
    }


def _predicted_collectives(plan: "ParallelPlan", model: nn.Module) -> dict[str, Any]:
    """How often each collective runs according to the plan's styles, and which styles do not say."""
    from rl_parallel_plans.plan.rows import collective_rows

    predicted: dict[str, Any] = {"forward": {}, "backward": {}, "unknown": []}
    for row in collective_rows(model, plan.styles, tp=plan.tp):
        for way, counts in (("forward", row.forward), ("backward", row.backward)):
            for kind, count in counts.items():
                predicted[way][kind] = predicted[way].get(kind, 0) + row.count * count
        predicted["unknown"] += row.untold
    return predicted


class _Mixin:
    """What a library mixes into a model class."""


def _differences_when_wrapped(request: Request, model: nn.Module, plan: "ParallelPlan") -> list[str]:
    """Where the plan of a subclass with the same name differs: mixins and FSDP make such classes."""
    cls = type(model)
    wrapped = copy.copy(model)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    wrapped.__class__ = type(cls.__name__, (_Mixin, cls), names)
    try:
        other = plan_of(request, wrapped)
    except PlanError as refusal:
        return [f"no plan: {refusal}"]
    if other.source != plan.source:
        return [f"the plan is then from {other.source}"]
    return [
        f"{pattern}: {other.styles.get(pattern)!r}"
        for pattern, style in plan.styles.items()
        if repr(other.styles.get(pattern)) != repr(style) and type(style).__repr__ is not object.__repr__
    ] + [f"{pattern} has no style" for pattern in plan.styles if pattern not in other.styles]


def _problems_at_full_size(request: Request) -> list[str] | str:
    """Problems of the plan with the model before it was made small, on the meta device.

    A string is the reason why transformers cannot build that model, which says nothing about the plan.
    """
    try:
        model = build(request.full, trust_remote_code=request.trust_remote_code)
        plan = plan_of(request, model)
    except UnusableModelError as reason:
        return str(reason)
    except PlanError as refusal:
        return [str(refusal)]
    return [str(problem) for problem in plan.problems if problem.kind not in plan.allow]
