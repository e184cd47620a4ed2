"""A plan: which rule shards which parameter of one model, and what that costs, as a value.

It knows the model's names, shapes and dtypes and no longer the model; it needs no mesh and no process group, and is
made on the meta device as well as anywhere else.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from torch import nn

from rl_parallel_plans.collectives import CollectiveRow, collective_rows
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.explain.text import as_text
from rl_parallel_plans.layer_stacks import fsdp_units_in_words
from rl_parallel_plans.parameter_rows import ParameterRow, parameter_rows
from rl_parallel_plans.problems import KINDS, Problem, find_problems
from rl_parallel_plans.registry import qualified_name
from rl_parallel_plans.ties import tied_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan was asked for, beside the model."""

    tp: int
    """Ranks that one layer is split over."""
    sequence_parallel: bool = False
    """Whether the residual stream is cut along the sequence."""
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
    asked: Asked
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
    asked: Asked,
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
