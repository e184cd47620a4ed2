"""Plans by the qualified name of a model class, so that registering one imports no modelling code.

A key is `module.qualname`. A lookup walks the method resolution order, so that a class made by FSDP, a mixin or an
adapter finds the plan of the class that it wraps. It knows nothing of what a plan holds.

Third parties register through the entry-point group `rl_parallel_plans`: each entry point is loaded once, at the
first lookup, and registers by the decorator when its module is imported.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from rl_parallel_plans.errors import PlanError

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
