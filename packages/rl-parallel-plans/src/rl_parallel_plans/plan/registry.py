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

    from rl_parallel_plans.plan.parallel_plan import Asked

    Made = tuple[dict[str, ParallelStyle], tuple[str, ...]]

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

    The function is called with the model, and with what it has parameters for of `tp`, `ep`, `sequence_parallel` and
    `output_projections`; asked for one that it has no parameter for, it is refused. It returns a mapping from a
    pattern of module names (`model.layers.*.mlp.up_proj`) to a `ParallelStyle` or a Hugging Face style string.

    Raises PlanError where another function holds the name already.
    """

    def register(builder: Builder) -> Builder:
        holder = _builders.get(model_name)
        if holder is not None and _where(holder) != _where(builder):
            raise PlanError(
                f"{model_name} has two plans, {_where(holder)} and {_where(builder)}: remove one, or pass the one you "
                "want as custom="
            )
        _builders[model_name] = builder
        return builder

    return register


def registered_plan(cls: type) -> tuple[str, PlanBuilder] | None:
    """The first class of the method resolution order that has a plan: its name and the plan's function.

    Code that Hugging Face downloaded with a model lies in `transformers_modules`, under a folder named after a commit:
    there alone the class's own name is enough. Raises PlanError where several plans are registered under it.
    """
    _load_entry_points()
    for ancestor in cls.__mro__:
        name = qualified_name(ancestor)
        if name in _builders:
            return name, _builders[name]
        if name.startswith(REMOTE_CODE) and (found := _by_bare_name(name, ancestor.__qualname__)) is not None:
            return found, _builders[found]
    return None


def _by_bare_name(name: str, bare: str) -> str | None:
    found = sorted(key for key in _builders if key.rpartition(".")[2] == bare)
    if len(found) > 1:
        raise PlanError(
            f"{name} was downloaded with its model and is known by its bare name only, under which {len(found)} plans "
            f"are registered: {found}; pass the right one as custom="
        )
    return found[0] if found else None


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


def _where(builder: PlanBuilder) -> str:
    return f"{builder.__module__}.{getattr(builder, '__qualname__', type(builder).__qualname__)}"


CustomPlan = str | Mapping[str, Any] | Callable[..., Any]


def resolve(custom: CustomPlan) -> Mapping[str, Any] | Callable[..., Any]:
    """Import `custom` where it is a path (`pkg.mod:name` or `pkg.mod.name`); PlanError where it fails."""
    found = _imported(custom) if isinstance(custom, str) else custom
    if not isinstance(found, Mapping) and not callable(found):
        raise PlanError(f"custom plan {custom!r} is a {type(found).__name__}: it must be a mapping or a function")
    return found


def built(plan: Mapping[str, Any] | Callable[..., Any], model: nn.Module, *, asked: "Asked") -> "Made":
    """The styles of a mapping, or of what a function returns for `model`, and notes.

    Hugging Face strings are translated, and the notes say where that departs from their letter.
    """
    if isinstance(plan, Mapping):
        _refuse_unheard(plan, asked)
    mapping = plan if isinstance(plan, Mapping) else _called(plan, model, asked)
    if not isinstance(mapping, Mapping):
        name = plan if isinstance(plan, Mapping) else qualified(plan)
        raise PlanError(f"plan function {name} returned a {type(mapping).__name__}: it must return a mapping")
    return _made(mapping, model)


def _made(mapping: Mapping[str, Any], model: nn.Module) -> "Made":
    from torch.distributed.tensor.parallel import ParallelStyle

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


def _refuse_unheard(mapping: Mapping[str, Any], asked: "Asked") -> None:
    """Refuse options for a mapping: it is fixed and takes none."""
    from rl_parallel_plans.plan.rows import cuts_sequence

    cut = any(map(cuts_sequence, mapping.values()))
    if asked.ep > 1 or asked.output_projections != "rowwise" or (asked.sequence_parallel and not cut):
        raise PlanError(
            f"a mapping of styles has no arguments, so {asked} has no effect on it; pass a function that accepts these "
            f"options, or request fewer"
        )


def _called(function: Callable[..., object], model: nn.Module, asked: "Asked") -> object:
    """Pass what the function has a parameter for; refuse to ask for what it cannot hear."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise PlanError(f"{qualified(function)} is no plan function: {error}") from error
    hears_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {field.name: getattr(asked, field.name) for field in fields(asked)}
    unheard = [
        field.name
        for field in fields(asked)
        if field.default is not MISSING and options[field.name] != field.default and field.name not in parameters
    ]
    if unheard and not hears_all:
        raise PlanError(
            f"plan function {qualified(function)} has no parameter {unheard[0]!r}, and {asked} was asked for: give it "
            "one, or do not ask"
        )
    try:
        return function(model, **{name: value for name, value in options.items() if hears_all or name in parameters})
    except PlanError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PlanError(
            f"plan function {qualified(function)} raised {type(error).__name__}: {error} ({last.filename}, line "
            f"{last.lineno}); it is called with the model"
        ) from error


def qualified(function: Callable[..., object]) -> str:
    """`module.name` of a function, as messages say it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None)}.{name}"


def _imported(path: str) -> object:
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module or not name:
        raise PlanError(f"custom plan {path!r} is not an import path: write it as 'package.module:name'")
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise PlanError(f"custom plan {path!r} cannot be imported: {type(error).__name__}: {error}") from error
