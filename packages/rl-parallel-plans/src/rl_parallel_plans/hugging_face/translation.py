"""A whole Hugging Face plan in parallel styles of the modules that it names, or a refusal.

Departures from the letter of the plan, each in the notes: the lm_head ends as DTensor Shard(-1), never gathered; what
is tied to it is sharded with it; a norm or an activation whose gradient the plan forgets to sum gets its sum; rules
that name nothing in this configuration are dropped where that changes nothing. What is not exact is refused with the
model, the pattern and the release of transformers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.completion import completed, heads
from rl_parallel_plans.hugging_face.patterns import matches, refusal, why_unmatched, within
from rl_parallel_plans.hugging_face.strings import (
    BLOCK,
    IN_BLOCK,
    SPLIT_INPUT,
    OwnParameters,
    SummedModule,
    check_known,
    contracts,
    parameter_rule,
    release,
    translate_parallel_style,
)
from rl_parallel_plans.plan.registry import qualified_name
from rl_parallel_plans.structure import direct_parameters, joined
from rl_parallel_plans.styles import VocabularyParallelEmbedding

Made = TypeVar("Made")

DROPPED = "dropped "
"""How a note begins that says why a rule was left out."""

SUMMED = ("moe_tp_experts", "all_reduce")
OWNERS = (*SUMMED, "local_params", "local")
"""Styles of a module whose own parameters have strings of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFacePlan:
    """A model's own plan, translated."""

    styles: dict[str, ParallelStyle]
    """Pattern of module names to style."""
    notes: tuple[str, ...]
    """What differs from the letter of the plan, and why: a sentence each."""


def get_hf_tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """The model's own tensor-parallel plan, translated: pattern of module names to style.

    Raises PlanError where the model has none, and where it cannot be translated exactly, with the model, the pattern
    and the release of transformers.
    """
    return own_plan(model).styles


def own_plan(model: nn.Module) -> HuggingFacePlan:
    """`get_hf_tp_plan`, with notes of what was dropped, added or mended."""
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise PlanError(f"{qualified_name(type(model))} has no tp_plan of its own (transformers {release()})")
    kept, notes = {}, []
    for pattern, style in plan.items():
        found = matches(model, pattern)
        if found.modules or found.owners:
            kept[pattern] = style
            continue
        reason, benign = why_unmatched(model, plan, pattern)
        if not benign:
            raise refusal(model, pattern, f"it names nothing: {reason}")
        notes.append(f"{DROPPED}{pattern!r} ({style}): {reason}")
    styles, departures = _translated(model, kept)
    return HuggingFacePlan(styles=styles, notes=(*notes, *departures))


def translate_plan(model: nn.Module, plan: Mapping[str, str]) -> HuggingFacePlan:
    """A whole plan of style strings, its lm_head and what is tied to it seen to.

    A pattern that names nothing stays, for `ParallelPlan.check` to list. Raises PlanError as `get_hf_tp_plan` does.
    """
    styles, notes = _translated(model, plan)
    return HuggingFacePlan(styles=styles, notes=tuple(notes))


def _translated(model: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, ParallelStyle], list[str]]:
    rules = _Rules(model, plan)
    styles = dict(rules.styles())
    return styles, completed(model, styles, plan, blocks=rules.blocks)


class _Rules:
    """The strings of one plan, each seen with the modules and parameters that it names."""

    def __init__(self, model: nn.Module, plan: Mapping[str, str]) -> None:
        seen_to = heads(model, plan)
        self.model = model
        for pattern in [pattern for pattern in plan if pattern in seen_to]:
            self._exact(pattern, partial(check_known, plan[pattern]))
        self.plan = {pattern: style for pattern, style in plan.items() if pattern not in seen_to}
        self.found = {pattern: matches(model, pattern) for pattern in self.plan}
        self.blocks = [pattern for pattern, style in self.plan.items() if style == BLOCK]

    def styles(self) -> Iterator[tuple[str, ParallelStyle]]:
        """The style of each pattern that names modules, and of each that holds parameters that are named."""
        for pattern, style in self.plan.items():
            self._exact(pattern, partial(check_known, style))
        own = self._own_strings()
        for pattern, style in self.plan.items():
            self._check_block(pattern)
            if self.found[pattern].owners and not self.found[pattern].modules:
                continue
            strings = own.pop(pattern, {})
            if style in OWNERS and (strings or style in ("moe_tp_experts", "local")):
                self._check_owner(pattern, strings)
            elif strings:
                name = next(iter(strings))
                raise self._refusal(pattern, f"it has the style {style!r}, and its own parameter {name!r} one too")
            if strings or style != "local":
                yield pattern, self._style(pattern, strings)
        for owner, strings in own.items():
            yield owner, OwnParameters(strings)

    def _own_strings(self) -> dict[str, dict[str, str]]:
        """Pattern of a module to the strings of its own parameters."""
        own: dict[str, dict[str, str]] = {}
        for pattern, style in self.plan.items():
            owner, _, name = pattern.rpartition(".")
            for path in self.found[pattern].owners:
                parameter = self.model.get_submodule(path).get_parameter(name)
                self._check_parameter(pattern, path, parameter)
                own.setdefault(owner, {})[name] = style
        return own

    def _style(self, pattern: str, strings: dict[str, str]) -> ParallelStyle:
        style = self.plan[pattern]
        if strings or style == "moe_tp_experts":
            if style in SUMMED:
                return SummedModule(strings, inputs=2 if style == "moe_tp_experts" else 1)
            return OwnParameters(strings)
        modules = [self.model.get_submodule(path) for path in self.found[pattern].modules]
        if modules and style in SPLIT_INPUT and all(isinstance(module, nn.Embedding) for module in modules):
            return VocabularyParallelEmbedding()
        config = getattr(self.model, "config", None)
        return self._exact(pattern, lambda: translate_parallel_style(style, config=config))

    def _check_block(self, pattern: str) -> None:
        """Inside a block nothing communicates, and outside everything does."""
        style, inside = self.plan[pattern], any(within(pattern, block) for block in self.blocks)
        if inside and style not in IN_BLOCK:
            raise self._refusal(pattern, f"style {style!r} communicates inside a {BLOCK!r}, which does it for all")
        if style in IN_BLOCK and not inside:
            raise self._refusal(pattern, f"style {style!r} leaves the communication to a {BLOCK!r} around it: none is")

    def _check_parameter(self, pattern: str, path: str, parameter: nn.Parameter) -> None:
        """A string on a parameter alone says nothing of what its module does with its input and output."""
        owner, _, name = pattern.rpartition(".")
        style, owner_style = self.plan[pattern], self.plan.get(owner)
        rule = self._exact(pattern, lambda: parameter_rule(style, name, parameter.ndim))
        if rule.placement.is_replicate():
            return
        if "gate_up" in name and "packed" not in style:
            raise self._refusal(pattern, f"style {style!r} would cut gate from up, which only a packed one keeps")
        if contracts(style, parameter.ndim) and owner_style not in SUMMED and owner_style != "local":
            raise self._refusal(
                pattern,
                f"each rank's output of {owner!r} would be one term of a sum, and no rule sums it ('moe_tp_experts')",
            )
        if owner_style not in OWNERS and parameter.ndim > 1:
            kind = type(self.model.get_submodule(path)).__name__
            reason = f"it cuts a parameter of {owner!r} ({kind}), and no rule says what that module does with its input"
            raise self._refusal(pattern, reason)

    def _check_owner(self, pattern: str, strings: Mapping[str, str]) -> None:
        """What a summed module holds whole, each rank would put into the sum; and it must hold something cut."""
        style = self.plan[pattern]
        for path in self.found[pattern].modules:
            module = self.model.get_submodule(path)
            whole = [name for name, _ in module.named_parameters(recurse=False) if name not in strings]
            whole += self._unstyled_inside(path) if style in SUMMED else []
            if whole:
                raise self._refusal(pattern, f"its parameter {whole[0]!r} is in no rule, and {style!r} leaves it whole")
            if style in SUMMED and not strings:
                raise self._refusal(pattern, f"style {style!r} sums the output of a module that no rule cuts")

    def _unstyled_inside(self, path: str) -> list[str]:
        styled = {other for found in self.found.values() for other in found.modules}
        inside = direct_parameters(self.model.get_submodule(path))
        return [joined(inner, name) for inner, name, _ in inside if inner and joined(path, inner) not in styled]

    def _exact(self, pattern: str, make: Callable[[], Made]) -> Made:
        try:
            return make()
        except PlanError as error:
            raise self._refusal(pattern, str(error)) from error

    def _refusal(self, pattern: str, reason: str) -> PlanError:
        return refusal(self.model, pattern, reason)
