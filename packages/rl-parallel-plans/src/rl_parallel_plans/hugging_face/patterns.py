"""What a pattern of a Hugging Face plan names in a model, and why one that names nothing may be dropped.

A pattern is a path whose tokens may hold `*`; it names modules, or parameters that a module holds itself. Hugging Face
ignores a pattern that names nothing, and its own plans are full of them: parts that this configuration lacks, and rules
repeated under a prefix that this class lacks. Both are told apart here from a rule that misses its aim.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.strings import release
from rl_parallel_plans.plan.registry import qualified_name
from rl_parallel_plans.structure import collapsed, direct_parameters, joined, matching_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """What one pattern names."""

    modules: tuple[str, ...]
    """Paths of modules."""
    owners: tuple[str, ...]
    """Paths of modules that hold the parameter that the pattern ends in."""


def matches(model: nn.Module, pattern: str) -> Matches:
    """The modules and the parameters that `pattern` names."""
    parent, _, name = pattern.rpartition(".")
    owners = matching_modules(model, parent) if parent else [("", model)]
    return Matches(
        modules=tuple(path for path, _ in matching_modules(model, pattern)),
        owners=tuple(path for path, module in owners if getattr(module, "_parameters", {}).get(name) is not None),
    )


def why_unmatched(model: nn.Module, plan: Mapping[str, str], pattern: str) -> tuple[str, bool]:
    """Why `pattern` names nothing in `model`, and whether the plan is as good without it.

    It is where the plan has the same rule under a longer prefix, and where the model lacks the part. It is not where
    the model has the part under a longer prefix and the plan has no rule for it there, nor where the missing part was
    to sum what others cut.
    """
    twins = [other for other in plan if other != pattern and _is_longer(other, pattern)]
    same = [twin for twin in twins if plan[twin] == plan[pattern]]
    if same:
        return f"repeats {same[0]!r}", True
    meant = next((path for path in _paths(model) if _is_longer(path, pattern)), None)
    if meant is not None:
        return f"the model has {meant}, for which the plan has no such rule: the plan's prefix is wrong", False
    cut = _left_unsummed(model, plan, pattern)
    if cut is not None:
        return f"{_lacking(model, pattern)}, and it was to sum what {cut!r} cuts", False
    return _lacking(model, pattern), True


def _left_unsummed(model: nn.Module, plan: Mapping[str, str], pattern: str) -> str | None:
    """The rule beside a row-wise one without a module that cuts features which nothing sums then."""
    if plan[pattern] not in ("rowwise", "local_rowwise"):
        return None
    parent = pattern.rpartition(".")[0]
    beside = (other for other in plan if other.rpartition(".")[0] == parent)
    return next((o for o in beside if plan[o] in ("colwise", "local_colwise") and matching_modules(model, o)), None)


def _is_longer(path: str, pattern: str) -> bool:
    """Whether `path` is `pattern` with more names before its layers (before its end, where it names no layers)."""
    long, short = path.split("."), pattern.split(".")
    tail = len(short) - max(short.index("*") - 1, 0) if "*" in short else len(short)
    if len(long) <= len(short) or long[-tail:] != short[-tail:]:
        return False
    rest = iter(long[:-tail])
    return all(token in rest for token in short[:-tail])


def _paths(model: nn.Module) -> dict[str, None]:
    """Path of each module and parameter with `*` for its indices, in the model's order."""
    modules = [collapsed(path) for path, _ in model.named_modules() if path]
    parameters = [collapsed(joined(path, name)) for path, name, _ in direct_parameters(model)]
    return dict.fromkeys([*modules, *parameters])


def _lacking(model: nn.Module, pattern: str) -> str:
    tokens = pattern.split(".")
    for end in range(len(tokens) - 1, 0, -1):
        ancestor = ".".join(tokens[:end])
        if matching_modules(model, ancestor):
            return f"{ancestor} has no {tokens[end]} in this configuration"
    return f"the model has no {tokens[0]} in this configuration"


def within(pattern: str, border: str) -> bool:
    """Whether `pattern` names something inside what `border` names."""
    inner, outer = pattern.split("."), border.split(".")
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def refusal(model: nn.Module, pattern: str, reason: str) -> PlanError:
    """The error that says where and over which release a plan cannot be translated."""
    installed = release()
    name = qualified_name(type(model))
    return PlanError(
        f"{name}, pattern {pattern!r} (transformers {installed}): {reason}; pass a plan of parallel styles as custom="
    )
