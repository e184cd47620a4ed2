"""A plan: which rule shards which parameter of one model, and what that costs, as a value; and how `plan_for` finds it.

A plan holds the model's names, shapes and dtypes but not the model. It needs no mesh and no process group, and is made
on the meta device as well as anywhere else.

`plan_for` tries the caller's plan, a registered one, one by the model's structure and the model's own `tp_plan`, in
this order. Each rule that has no plan says why, and what was passed over is part of the plan.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.explain.text import as_text
from rl_parallel_plans.plan.adapters import has_adapters, with_adapters, without_adapters
from rl_parallel_plans.plan.problems import KINDS, Problem, find_problems
from rl_parallel_plans.plan.registry import CustomPlan, build_styles, qualified_name, registered_plan, resolve
from rl_parallel_plans.plan.rows import CollectiveRow, ParameterRow, collective_rows, parameter_rows
from rl_parallel_plans.structure import fsdp_units_in_words, matching_modules, tied_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    BuiltStyles = tuple[dict[str, ParallelStyle], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The arguments of `plan_for` that decide what the plan does."""

    tp: int
    """Ranks that one layer is split over."""
    sequence_parallel: bool = False
    """Whether the residual stream is sharded along the sequence."""
    output_projections: Literal["rowwise", "colwise"] = "rowwise"
    """How o_proj and down_proj are cut."""
    ep: int = 1
    """Ranks that experts are shared out over."""

    def __post_init__(self) -> None:
        for name in ("tp", "ep"):
            ranks = getattr(self, name)
            if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
                raise PlanError(f"{name} is {ranks!r}: it must be a whole number of ranks, at least 1")
        if self.output_projections not in ("rowwise", "colwise"):
            raise PlanError(f"output_projections is {self.output_projections!r}: it is 'rowwise' or 'colwise'")

    def __str__(self) -> str:
        options = [f"tp={self.tp}"]
        if self.sequence_parallel:
            options.append("sequence_parallel=True")
        if self.output_projections != "rowwise":
            options.append(f"output_projections={self.output_projections!r}")
        if self.ep > 1:
            options.append(f"ep={self.ep}")
        return ", ".join(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How one model is sharded over the tp axis of a mesh. Made by `plan_for`."""

    model_name: str
    """`module.qualname` of the class that the plan was made for."""
    source: str
    """Which rule made the plan, and at tp=1 why there is nothing to do."""
    asked: PlanRequest
    """What the plan was asked for."""
    styles: "Mapping[str, ParallelStyle]"
    """Pattern of module names to the style applied to each match; empty at tp=1."""
    passed_over: tuple[str, ...]
    """The rules that were asked before `source`, each with the reason why it has no plan for this model."""
    notes: tuple[str, ...]
    """Where the plan departs from what its source says, and why."""
    parameters: tuple[ParameterRow, ...]
    """One row for the same parameter in every layer: placement, shapes and bytes."""
    collectives: tuple[CollectiveRow, ...]
    """What each kind of decoder layer, and each module outside the layers, communicates over tp."""
    ties: tuple[tuple[str, ...], ...]
    """Names that are one parameter, before sharding and after."""
    fsdp_units: str
    """What `apply_fsdp` would shard as one unit, in words."""
    allow: frozenset[str]
    """Kinds of problem that the caller accepts."""
    problems: tuple[Problem, ...]
    """What was found wrong for the model that the plan was made for, allowed or not."""

    @property
    def tp(self) -> int:
        """Ranks that one layer is split over: the size that the tp axis of the mesh must have."""
        return self.asked.tp

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream between blocks is cut along the sequence."""
        return self.asked.sequence_parallel

    def explain(self, *, dp: int = 1) -> str:
        """The plan over `dp` ranks of FSDP as text.

        Rule, placement, shape and bytes per parameter, what stays whole on every tp rank, what is communicated.
        `as_json(plan)` and `as_html(plan)` tell the same.
        """
        return as_text(self, dp=dp)

    def check(self, model: nn.Module) -> None:
        """Raise one PlanError that lists every problem of the plan with `model`; touch nothing.

        Problems of the kinds in `allow` do not count.
        """
        found = find_problems(model, self.styles, self.asked.tp, ep=self.asked.ep)
        problems = [problem for problem in found if problem.kind not in self.allow]
        if problems:
            listed = "\n".join(f"  {i}. {problem.message}" for i, problem in enumerate(problems, 1))
            raise PlanError(
                f"the plan from {self.source} does not fit {qualified_name(type(model))} at {self.asked}, "
                f"{len(problems)} problem(s):\n{listed}"
            )


def make_plan(
    model: nn.Module,
    styles: "Mapping[str, ParallelStyle]",
    *,
    asked: PlanRequest,
    source: str,
    passed_over: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
    allow: Collection[str] = (),
) -> ParallelPlan:
    """Describe `styles` for `model`."""
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    if unknown := set(allow) - KINDS.keys():
        raise PlanError(f"allow={sorted(unknown)}: there are no such kinds of problem; known are {sorted(KINDS)}")
    return ParallelPlan(
        model_name=qualified_name(type(model)),
        source=source,
        asked=asked,
        styles=MappingProxyType(dict(styles)),
        passed_over=passed_over,
        notes=notes,
        parameters=parameter_rows(model, styles, asked.tp),
        collectives=collective_rows(model, styles, tp=asked.tp),
        ties=tuple(map(tuple, tied_names(model))),
        fsdp_units=fsdp_units_in_words(model),
        allow=frozenset(allow),
        problems=tuple(find_problems(model, styles, asked.tp, ep=asked.ep)),
    )


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
    allow: kinds of problem to list without refusing them, of `rl_parallel_plans.plan.problems.KINDS`.

    Raises PlanError where no rule has a plan, with each rule's reason.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"model is a {type(model).__name__}: plan_for takes an nn.Module, on the meta device if need be"
        )
    asked = PlanRequest(tp=tp, sequence_parallel=sequence_parallel, output_projections=output_projections, ep=ep)
    brought = resolve(custom) if custom is not None else None
    if tp == 1 and ep == 1:
        return make_plan(model, {}, asked=asked, source="nothing to shard at tp=1", allow=allow)
    if brought is not None:
        name = custom if isinstance(custom, str) else getattr(custom, "__qualname__", type(custom).__name__)
        styles, notes = build_styles(brought, model, asked=asked)
        return make_plan(model, styles, asked=asked, source=f"custom: {name}", notes=notes, allow=allow)
    if (registered := registered_plan(type(model))) is not None:
        styles, notes = build_styles(registered[1], model, asked=asked)
        return make_plan(model, styles, asked=asked, source=f"registered: {registered[0]}", notes=notes, allow=allow)

    name = qualified_name(type(model))
    passed_over = [f"registered: no plan for {name} or a class that it derives from"]
    for source, build in (("structure", _by_structure), ("Hugging Face tp_plan", _own_plan)):
        try:
            styles, notes = build(model, asked)
        except PlanError as refusal:
            passed_over.append(f"{source}: {refusal}")
            continue
        rejected = tuple(passed_over)
        return make_plan(model, styles, asked=asked, source=source, passed_over=rejected, notes=notes, allow=allow)
    reasons = "\n".join(f"  - {reason}" for reason in passed_over)
    raise PlanError(
        f"no plan for {name} at {asked}:\n{reasons}\npass custom= (a mapping of module patterns to parallel styles), "
        f'register one with @register_plan("{name}"), or use tp=1'
    )


def _by_structure(model: nn.Module, asked: PlanRequest) -> "BuiltStyles":
    from rl_parallel_plans.families.decoder import decoder_plan, departures
    from rl_parallel_plans.families.parts import Layout

    layout = Layout(
        tp=asked.tp,
        sequence_parallel=asked.sequence_parallel and asked.tp > 1,
        projections=asked.output_projections,
    )
    adapted = has_adapters(model)
    styles = decoder_plan(without_adapters(model) if adapted else model, layout)
    if adapted:
        styles = with_adapters(model, styles)
    notes = tuple(departures(model, styles)) if asked.tp > 1 else ()
    return with_expert_parallel(model, styles, ep=asked.ep, tp=asked.tp), notes


def _own_plan(model: nn.Module, asked: PlanRequest) -> "BuiltStyles":
    from rl_parallel_plans.hugging_face import own_plan

    if has_adapters(model):
        raise PlanError("a tp_plan says nothing of adapters inside of linear layers")
    if asked.sequence_parallel:
        raise PlanError("a tp_plan keeps the residual stream whole on every rank: it has no sequence parallelism")
    if asked.output_projections != "rowwise":
        raise PlanError("a tp_plan says itself how its output projections are sharded: rowwise is all it can be asked")
    plan = own_plan(model)
    styles = with_expert_parallel(model, plan.styles, ep=asked.ep, tp=asked.tp)
    return styles, plan.notes if asked.tp > 1 else ()


def with_expert_parallel(
    model: nn.Module, styles: "dict[str, ParallelStyle]", *, ep: int, tp: int
) -> "dict[str, ParallelStyle]":
    """The styles of a plan by structure, or of Hugging Face's, with the experts' ones made expert-parallel if ep > 1.

    At tp=1 these alone. Raises PlanError where there are no stacked experts.
    """
    if ep == 1:
        return styles
    from rl_parallel_plans.hugging_face.strings import SummedModule
    from rl_parallel_plans.styles import Experts
    from rl_parallel_plans.styles.expert_dispatch import ExpertParallel
    from rl_parallel_plans.styles.table import LocalParameters

    def shards_experts(pattern: str, style: "ParallelStyle") -> bool:
        if isinstance(style, Experts):
            return True
        # Hugging Face's style does not tell: stacked experts have weights of three dims.
        parameters = [each for _, module in matching_modules(model, pattern) for each in module.named_parameters()]
        weights = [parameter for name, parameter in parameters if not name.endswith("bias")]
        return isinstance(style, SummedModule) and bool(weights) and all(weight.ndim == 3 for weight in weights)

    experts = {
        pattern: ExpertParallel(ep=ep, features=style if tp > 1 else None)
        for pattern, style in styles.items()
        if isinstance(style, LocalParameters) and shards_experts(pattern, style)
    }
    if not experts:
        raise PlanError(f"ep={ep} was asked for and the model has no stacked experts: plan it with ep=1")
    return {**(styles if tp > 1 else {}), **experts}
