"""A plan: which rule shards which parameter of one model, and what that costs, as a value.

It knows the model's names, shapes and dtypes and no longer the model; it needs no mesh and no process group, and is
made on the meta device as well as anywhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.explain import explanation
from rl_parallel_plans.parameter_rows import ParameterRow, parameter_rows
from rl_parallel_plans.problems import find_problems
from rl_parallel_plans.registry import qualified_name
from rl_parallel_plans.structure import decoder_layers
from rl_parallel_plans.ties import tied_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How one model is sharded over the tp axis of a mesh. Made by `plan_for`."""

    model_name: str
    """`module.qualname` of the class that the plan was made for."""
    source: str
    """Which rule made the plan, and at tp=1 why there is nothing to do."""
    tp: int
    """Ranks that one layer is split over: the size that the tp axis of the mesh must have."""
    styles: "Mapping[str, ParallelStyle]"
    """Pattern of module names to the style applied to each match; empty at tp=1."""
    passed_over: tuple[str, ...]
    """The rules that were asked before `source`, each with the reason why it has no plan for this model."""
    parameters: tuple[ParameterRow, ...]
    """One row for the same parameter in every layer: placement, shapes and bytes."""
    ties: tuple[tuple[str, ...], ...]
    """Names that are one parameter, before sharding and after."""
    fsdp_units: str
    """What `apply_fsdp` would shard as one unit, in words."""
    problems: tuple[str, ...]
    """What `check` would raise for the model that the plan was made for."""

    def explain(self) -> str:
        """The plan as text: rule, placement, shape and bytes per parameter, totals, what stays whole on every rank."""
        return explanation(
            self.parameters,
            title=f"plan for {self.model_name}, tp={self.tp}",
            source=self.source,
            passed_over=self.passed_over,
            ties=self.ties,
            fsdp_units=self.fsdp_units,
            problems=self.problems,
        )

    def check(self, model: nn.Module) -> None:
        """Raise one PlanError that lists every problem of the plan with `model`; touch nothing."""
        problems = find_problems(model, self.styles, self.tp)
        if problems:
            listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
            raise PlanError(
                f"the plan from {self.source} does not fit {qualified_name(type(model))} at tp={self.tp}, "
                f"{len(problems)} problem(s):\n{listed}"
            )


def make_plan(
    model: nn.Module, styles: "Mapping[str, ParallelStyle]", *, tp: int, source: str, passed_over: tuple[str, ...]
) -> ParallelPlan:
    """Describe `styles` for `model`."""
    return ParallelPlan(
        model_name=qualified_name(type(model)),
        source=source,
        tp=tp,
        styles=MappingProxyType(dict(styles)),
        passed_over=passed_over,
        parameters=parameter_rows(model, styles, tp),
        ties=tuple(map(tuple, tied_names(model))),
        fsdp_units=_fsdp_units(model),
        problems=tuple(find_problems(model, styles, tp)),
    )


def _fsdp_units(model: nn.Module) -> str:
    stack = decoder_layers(model)
    if stack is None:
        return "none: no nn.ModuleList of layers"
    kinds = sorted({type(layer).__name__ for layer in stack[1]})
    return f"{stack[0]}.* ({len(stack[1])} x {', '.join(kinds)}), then the rest of the model as one"
