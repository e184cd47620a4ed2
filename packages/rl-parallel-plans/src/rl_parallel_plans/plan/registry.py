"""Plans that callers bring: registered by the qualified name of a model class, or passed as `custom=`.

Registering by name imports no modelling code. A lookup walks the method resolution order, so that a class made by FSDP,
a mixin or an adapter finds the plan of the class that it wraps. Third parties register through the entry-point group
`rl_parallel_plans`: each entry point is loaded once, at the first lookup, and registers by the decorator when its
module is imported. A custom plan is a mapping, a function, or the import path of either.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from rl_parallel_plans.plan.parallel_plan import PlanRequest

PlanBuilder = Callable[..., Any]
Builder = TypeVar("Builder", bound=PlanBuilder)
_builders: dict[str, PlanBuilder] = {}
_loaded_entry_points: set[str] = set()
ENTRY_POINT_GROUP = "rl_parallel_plans"
REMOTE_CODE = "transformers_modules."


def qualified_name(cls: type) -> str:
    """`module.qualname` of a class: the key under which its plan is registered."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_plan(model_name: str) -> Callable[[Builder], Builder]:
    """Register the decorated function as the plan of the model class named `model_name` (`module.qualname`).

    The function is called with the model, and with those of `tp`, `ep`, `sequence_parallel` and `output_projections`
    that it has parameters for; a plan that needs another one of them is refused. It returns a mapping from a
    pattern of module names (`model.layers.*.mlp.up_proj`) to a `ParallelStyle` or a Hugging Face style string.

    Raises PlanError where another function holds the name already.
    """

    def register(builder: Builder) -> Builder:
        holder = _builders.get(model_name)
        if holder is not None and _function_name(holder) != _function_name(builder):
            raise PlanError(
                f"{model_name} has two plans, {_function_name(holder)} and {_function_name(builder)}: remove one, or "
                "pass the one you want as custom="
            )
        _builders[model_name] = builder
        return builder

    return register


def registered_plan(cls: type) -> tuple[str, PlanBuilder] | None:
    """The first class of the method resolution order that has a plan: its name and the plan's function.

    Code that Hugging Face downloaded with a model is in `transformers_modules`, under a folder named after a commit:
    there alone the class's own name is enough. Raises PlanError where several plans are registered under it.
    """
    _load_entry_points()
    for ancestor in cls.__mro__:
        name = qualified_name(ancestor)
        if name in _builders:
            return name, _builders[name]
        if not name.startswith(REMOTE_CODE):
            continue
        found = sorted(key for key in _builders if key.rpartition(".")[2] == ancestor.__qualname__)
        if len(found) > 1:
            raise PlanError(
                f"{name} was downloaded with its model and is known by its bare name only, under which {len(found)} "
                f"plans are registered: {found}; pass the right one as custom="
            )
        if found:
            return found[0], _builders[found[0]]
    return None


def _load_entry_points() -> None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        key = f"{entry_point.name} = {entry_point.value}"
        if key in _loaded_entry_points:
            continue
        try:
            entry_point.load()
        except Exception as error:
            distribution = entry_point.dist.name if entry_point.dist else "unknown distribution"
            raise PlanError(
                f"entry point {key!r} of {distribution} (group {ENTRY_POINT_GROUP}) failed with "
                f"{type(error).__name__}: {error}; repair or uninstall {distribution}"
            ) from error
        _loaded_entry_points.add(key)


# -- Plans passed as custom= -------------------------------------------------------------------------

CustomPlan = str | Mapping[str, Any] | Callable[..., Any]


def resolve(custom: CustomPlan) -> Mapping[str, Any] | Callable[..., Any]:
    """Import `custom` where it is a path (`pkg.mod:name` or `pkg.mod.name`); PlanError where it fails."""
    found: object = custom
    if isinstance(custom, str):
        module, _, name = custom.partition(":") if ":" in custom else custom.rpartition(".")
        if not module or not name:
            raise PlanError(f"custom plan {custom!r} is not an import path: write it as 'package.module:name'")
        try:
            found = getattr(import_module(module), name)
        except Exception as error:
            raise PlanError(f"custom plan {custom!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping) and not callable(found):
        raise PlanError(f"custom plan {custom!r} is a {type(found).__name__}: it must be a mapping or a function")
    return found


def build_styles(
    plan: Mapping[str, Any] | Callable[..., Any], model: nn.Module, *, asked: "PlanRequest"
) -> "tuple[dict[str, ParallelStyle], tuple[str, ...]]":
    """The styles of a mapping, or of what a function returns for `model`, and notes.

    Hugging Face strings are translated, and the notes say where that departs from their letter.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    from rl_parallel_plans.plan.rows import cuts_sequence

    if isinstance(plan, Mapping):
        mapping = plan
        cut = any(map(cuts_sequence, mapping.values()))
        if asked.ep > 1 or asked.output_projections != "rowwise" or (asked.sequence_parallel and not cut):
            raise PlanError(
                f"a mapping of styles has no arguments, so {asked} has no effect on it; pass a function that accepts "
                f"these options, or request fewer"
            )
    else:
        returned = _call(plan, model, asked)
        if not isinstance(returned, Mapping):
            what = f"plan function {_function_name(plan)} returned a {type(returned).__name__}"
            raise PlanError(f"{what}: it must return a mapping")
        mapping = returned
    if mapping and all(isinstance(style, str) for style in mapping.values()):
        from rl_parallel_plans.hugging_face import translate_plan

        translated = translate_plan(model, mapping)
        return translated.styles, translated.notes
    for pattern, style in mapping.items():
        if not isinstance(style, ParallelStyle):
            raise PlanError(
                f"pattern {pattern!r} maps to a {type(style).__name__}: a plan maps every pattern to a ParallelStyle "
                "of torch.distributed.tensor.parallel, or every pattern to a Hugging Face style string"
            )
    return dict(mapping), ()


def _call(function: Callable[..., object], model: nn.Module, asked: "PlanRequest") -> object:
    """Call a plan function with the options that it has a parameter for; refuse it if one was asked for that is not."""
    name = _function_name(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise PlanError(f"{name} is no plan function: {error}") from error
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {}
    for field in fields(asked):
        value = getattr(asked, field.name)
        if takes_all or field.name in parameters:
            options[field.name] = value
        elif field.default is not MISSING and value != field.default:
            raise PlanError(
                f"plan function {name} has no parameter {field.name!r}, and {asked} was asked for: give it one, or do "
                "not ask"
            )
    try:
        return function(model, **options)
    except PlanError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(
            f"plan function {name} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}); it is "
            "called with the model"
        ) from error


def _function_name(function: Callable[..., object]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"
