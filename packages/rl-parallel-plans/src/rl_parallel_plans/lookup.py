"""Find the plan of a model: the caller's, a registered one, one by its structure, the model's own; or refuse.

The order is fixed, each rule that has no plan says why, and none stands in for another silently: what was passed over
is part of the plan.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from torch import nn

from rl_parallel_plans.adapters import has_adapters, with_adapters, without_adapters
from rl_parallel_plans.custom import CustomPlan, built, resolve
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.expert_parallel import with_expert_parallel
from rl_parallel_plans.plan import Asked, ParallelPlan, make_plan
from rl_parallel_plans.registry import qualified_name, registered_plan

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    Made = tuple[dict[str, ParallelStyle], tuple[str, ...]]


def plan_for(
    model: nn.Module,
    *,
    tp: int,
    sequence_parallel: bool = False,
    output_projections: Literal["rowwise", "colwise"] = "rowwise",
    ep: int = 1,
    custom: CustomPlan | None = None,
    allow: Collection[str] = (),
) -> ParallelPlan:
    """Which rule shards which parameter of `model` over `tp` ranks.

    Pure: reads names, shapes and dtypes (the meta device will do), needs no process group, changes nothing. The plan
    may have problems; `plan.check(model)` lists them and `apply_tensor_parallel` refuses them.

    model: any nn.Module; a Hugging Face model is recognised by its parts or by its own `tp_plan`.
    tp: ranks that one layer is split over. At 1 the plan has no styles, and says so.
    sequence_parallel: cut the residual stream between the blocks along the sequence (arXiv:2205.05198): less memory
        for activations, the same bytes sent.
    output_projections: "colwise" makes o_proj and down_proj column-wise too: no sum is cut over ranks, so that half
        precision rounds as on one rank, for more communication. Worth it for tp of 4 and above where the
        log-probabilities of trainer and engine drift apart.
    ep: ranks that the experts of a mixture are shared out over; above 1, tokens travel to their experts and back
        (`apply_expert_parallel`).
    custom: a mapping of patterns to styles, a function of the model that returns one, or the import path of either
        (`package.module:name`). It goes before every other rule.
    allow: kinds of problem to list without refusing them, of `rl_parallel_plans.problems.KINDS`.

    Raises PlanError where no rule has a plan, with each rule's reason.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}: plan_for takes an nn.Module, on the meta device if need be"
        )
    asked = Asked(tp=tp, sequence_parallel=sequence_parallel, output_projections=output_projections, ep=ep)
    brought = resolve(custom) if custom is not None else None
    if tp == 1 and ep == 1:
        return make_plan(model, {}, asked=asked, source="nothing to shard at tp=1", allow=allow)
    if brought is not None:
        name = custom if isinstance(custom, str) else getattr(custom, "__qualname__", type(custom).__name__)
        styles, notes = built(brought, model, asked=asked)
        return make_plan(model, styles, asked=asked, source=f"custom: {name}", notes=notes, allow=allow)
    return _found(model, asked, allow)


def _found(model: nn.Module, asked: Asked, allow: Collection[str]) -> ParallelPlan:
    name = qualified_name(type(model))
    if (registered := registered_plan(type(model))) is not None:
        styles, notes = built(registered[1], model, asked=asked)
        source = f"registered: {registered[0]}"
        return make_plan(model, styles, asked=asked, source=source, notes=notes, allow=allow)
    passed_over: tuple[str, ...] = (f"registered: no plan for {name} or a class that it derives from",)
    for source, builder in (("structure", _by_structure), ("Hugging Face tp_plan", _own_plan)):
        try:
            styles, notes = builder(model, asked)
        except PlanError as refusal:
            passed_over += (f"{source}: {refusal}",)
        else:
            return make_plan(
                model, styles, asked=asked, source=source, passed_over=passed_over, notes=notes, allow=allow
            )
    reasons = "\n".join(f"  - {reason}" for reason in passed_over)
    raise PlanError(
        f"no plan for {name} at {asked}:\n{reasons}\npass custom= (a mapping of module patterns to parallel styles), "
        f'register one with @register_plan("{name}"), or use tp=1'
    )


def _by_structure(model: nn.Module, asked: Asked) -> "Made":
    from rl_parallel_plans.families.decoder import decoder_plan, departures
    from rl_parallel_plans.families.parts import Layout

    layout = Layout(
        tp=asked.tp,
        sequence_parallel=asked.sequence_parallel and asked.tp > 1,
        projections=asked.output_projections,
    )
    adapted = has_adapters(model)
    bare = without_adapters(model) if adapted else model
    styles = decoder_plan(bare, layout)
    styles = with_adapters(model, styles) if adapted else styles
    notes = tuple(departures(model, styles)) if asked.tp > 1 else ()
    return (styles if asked.ep == 1 else with_expert_parallel(model, styles, ep=asked.ep, tp=asked.tp)), notes


def _own_plan(model: nn.Module, asked: Asked) -> "Made":
    from rl_parallel_plans.hugging_face import own_plan

    if has_adapters(model):
        raise PlanError("a tp_plan says nothing of adapters inside of linear layers")
    if asked.sequence_parallel:
        raise PlanError("a tp_plan keeps the residual stream whole on every rank: it has no sequence parallelism")
    if asked.output_projections != "rowwise":
        raise PlanError("a tp_plan says itself how its output projections are sharded: rowwise is all it can be asked")
    plan = own_plan(model)
    if asked.ep == 1:
        return plan.styles, plan.notes
    return with_expert_parallel(model, plan.styles, ep=asked.ep, tp=asked.tp), plan.notes if asked.tp > 1 else ()
