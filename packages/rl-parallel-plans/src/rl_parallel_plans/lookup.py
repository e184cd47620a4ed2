"""Find the plan of a model: the caller's, a registered one, the Llama family's, the model's own; or refuse.

The order is fixed, each rule that has no plan says why, and none stands in for another silently: what was passed over
is part of the plan.
"""

from torch import nn

from rl_parallel_plans.custom import CustomPlan, built, resolve
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan import ParallelPlan, make_plan
from rl_parallel_plans.registry import qualified_name, registered_plan


def plan_for(
    model: nn.Module, *, tp: int, sequence_parallel: bool = False, custom: CustomPlan | None = None
) -> ParallelPlan:
    """Which rule shards which parameter of `model` over `tp` ranks.

    Pure: reads names, shapes and dtypes (the meta device will do), needs no process group, changes nothing. The plan
    may have problems; `plan.check(model)` lists them and `apply_tensor_parallel` refuses them.

    model: any nn.Module; a Hugging Face model is recognised by its parts or by its own `tp_plan`.
    tp: ranks that one layer is split over. At 1 the plan has no styles, and says so.
    custom: a mapping of patterns to styles, a function of the model that returns one, or the import path of either
        (`package.module:name`). It goes before every other rule.

    Raises PlanError where no rule has a plan, with each rule's reason, and for `sequence_parallel=True`.
    """
    if not isinstance(tp, int) or tp < 1:
        raise PlanError(f"tp is {tp!r}: it must be a whole number of ranks, at least 1")
    if sequence_parallel:
        raise PlanError(
            "sequence_parallel=True is not offered by this version: its plans keep the residual stream whole on every "
            "tp rank, and sharding it along the sequence needs other plans; pass sequence_parallel=False, and shorten "
            "the microbatch or recompute activations where they do not fit"
        )
    brought = resolve(custom) if custom is not None else None
    if tp == 1:
        return make_plan(model, {}, tp=tp, source="nothing to shard at tp=1", passed_over=())
    if brought is not None:
        name = custom if isinstance(custom, str) else getattr(custom, "__qualname__", type(custom).__name__)
        return make_plan(model, built(brought, model, tp=tp), tp=tp, source=f"custom: {name}", passed_over=())
    return _found(model, tp)


def _found(model: nn.Module, tp: int) -> ParallelPlan:
    from rl_parallel_plans.hugging_face import get_hf_tp_plan
    from rl_parallel_plans.llama_family import llama_family_plan

    name = qualified_name(type(model))
    passed_over: tuple[str, ...] = (f"registered: no plan for {name} or a class that it derives from",)
    if (registered := registered_plan(type(model))) is not None:
        styles = built(registered[1], model, tp=tp)
        return make_plan(model, styles, tp=tp, source=f"registered: {registered[0]}", passed_over=())
    for source, builder in (("structure: Llama family", llama_family_plan), ("Hugging Face tp_plan", get_hf_tp_plan)):
        try:
            styles = builder(model)
        except PlanError as refusal:
            passed_over += (f"{source}: {refusal}",)
        else:
            return make_plan(model, styles, tp=tp, source=source, passed_over=passed_over)
    reasons = "\n".join(f"  - {reason}" for reason in passed_over)
    raise PlanError(
        f"no plan for {name} at tp={tp}:\n{reasons}\npass custom= (a mapping of module patterns to parallel styles), "
        f'register one with @register_plan("{name}"), or use tp=1'
    )
