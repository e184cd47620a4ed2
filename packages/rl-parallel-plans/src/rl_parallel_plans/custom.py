"""A plan that the caller brings: a mapping, a function, or the import path of either."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

CustomPlan = str | Mapping[str, Any] | Callable[..., Any]


def resolve(custom: CustomPlan) -> Mapping[str, Any] | Callable[..., Any]:
    """Import `custom` where it is a path (`pkg.mod:name` or `pkg.mod.name`); PlanError where it fails."""
    found = _imported(custom) if isinstance(custom, str) else custom
    if not isinstance(found, Mapping) and not callable(found):
        raise PlanError(f"custom plan {custom!r} is a {type(found).__name__}: it must be a mapping or a function")
    return found


def built(plan: Mapping[str, Any] | Callable[..., Any], model: nn.Module, *, tp: int) -> "dict[str, ParallelStyle]":
    """The styles of a mapping, or of what a function returns for `model`; Hugging Face strings are translated."""
    mapping = plan if isinstance(plan, Mapping) else _called(plan, model, tp=tp)
    if not isinstance(mapping, Mapping):
        raise PlanError(f"plan function {plan!r} returned a {type(mapping).__name__}: it must return a mapping")
    return _styles(mapping, model)


def _styles(mapping: Mapping[str, Any], model: nn.Module) -> "dict[str, ParallelStyle]":
    from torch.distributed.tensor.parallel import ParallelStyle

    from rl_parallel_plans.hugging_face import translate_plan

    if mapping and all(isinstance(style, str) for style in mapping.values()):
        return translate_plan(model, mapping)
    for pattern, style in mapping.items():
        if not isinstance(style, ParallelStyle):
            raise PlanError(
                f"pattern {pattern!r} maps to a {type(style).__name__}: a plan maps every pattern to a ParallelStyle "
                "of torch.distributed.tensor.parallel, or every pattern to a Hugging Face style string"
            )
    return dict(mapping)


def _called(function: Callable[..., object], model: nn.Module, *, tp: int) -> object:
    accepts_tp = "tp" in inspect.signature(function).parameters
    return function(model, tp=tp) if accepts_tp else function(model)


def _imported(path: str) -> object:
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise PlanError(f"custom plan {path!r} is not an import path: write it as 'package.module:name'")
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise PlanError(f"custom plan {path!r} cannot be imported: {type(error).__name__}: {error}") from error
