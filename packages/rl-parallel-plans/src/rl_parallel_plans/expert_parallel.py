"""Share out experts over the ep axis of a mesh, before the rest of a model is sharded.

The ep axis is data-parallel for everything but experts: each of its ranks has tokens of its own. FSDP then takes it
among its axes (`dp_axis=("dp", "ep")`), and leaves the experts to the others. Knows the experts of a plan by their
style; changes nothing else.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.dtensor import is_dtensor, submesh
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan import ParallelPlan
from rl_parallel_plans.structure import matching_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def with_expert_parallel(
    model: nn.Module, styles: "Mapping[str, ParallelStyle]", *, ep: int, tp: int
) -> "dict[str, ParallelStyle]":
    """The styles of a plan by structure, or of Hugging Face's, with the experts' ones made expert-parallel.

    At tp=1 these alone. Raises PlanError where there are no stacked experts.
    """
    from rl_parallel_plans.styles.expert_dispatch import ExpertParallel
    from rl_parallel_plans.styles.table import LocalParameters

    experts = {
        pattern: ExpertParallel(ep=ep, features=style if tp > 1 else None)
        for pattern, style in styles.items()
        if isinstance(style, LocalParameters)
        and _shards_experts(style, [module for _, module in matching_modules(model, pattern)])
    }
    if not experts:
        raise PlanError(f"ep={ep} was asked for and the model has no stacked experts: plan it with ep=1")
    return {**(styles if tp > 1 else {}), **experts}


def _shards_experts(style: "ParallelStyle", modules: list[nn.Module]) -> bool:
    """Whether `style` is one of stacked experts: in Hugging Face's plans, of a module whose weights have three dims."""
    from rl_parallel_plans.hugging_face.strings import SummedModule
    from rl_parallel_plans.styles import Experts

    if isinstance(style, Experts):
        return True
    weights = [p for module in modules for name, p in module.named_parameters() if not name.endswith("bias")]
    return isinstance(style, SummedModule) and bool(weights) and all(weight.ndim == 3 for weight in weights)


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


def refuse_whole_experts(model: nn.Module, plan: ParallelPlan) -> None:
    """PlanError where experts that the plan shares out are not shared out yet."""
    if any(not is_dtensor(p) for _, module in experts_of(model, plan) for p in module.parameters(recurse=False)):
        raise PlanError(
            f"the plan is for ep={plan.asked.ep} and the experts are whole: call apply_expert_parallel first, or "
            "parallelize, which does both"
        )


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
