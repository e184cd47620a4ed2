"""How a style changes what a module computes: wrappers around its forward, and nothing else.

A wrapper is a function of (module, call, args, kwargs) that returns the output; `call` is the forward, or the wrapper
inside this one. What it needs between entrance and exit are its own local variables, so nothing is left on a module
by an exception or by a recomputation, and torch.compile traces it like the model's own code.

The module's class becomes a subclass, made once for each class, as FSDP2's does: hooks have ids that differ from layer
to layer, on which torch.compile would compile each layer anew until it gives up. Hooks, FSDP2's among them, run around
all wrappers.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn

from rl_parallel_plans.activation_checkpointing import without_recomputation
from rl_parallel_plans.styles.partial_gradients import complete_gradients


class Wrapper(Protocol):
    """What runs in place of a forward, and calls it."""

    def __call__(  # noqa: D102, PLR0917 - as the wrapped forward is called
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any: ...


def wrap_forward(module: nn.Module, wrapper: Wrapper) -> None:
    """Let `wrapper` run around the forward of `module`, and around the wrappers that it has."""
    with without_recomputation(module):  # which runs the wrappers again as well
        state = module.__dict__
        if "forward" in state:  # an instance's own forward would hide that of its class
            state["own_forward"] = state.pop("forward")
        state["forward_wrappers"] = (*state.get("forward_wrappers", ()), wrapper)
        if not hasattr(type(module), "unsharded_class"):
            module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type] # a class is hashable


@functools.cache
def _sharded_class(cls: Any) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(self, len(self.forward_wrappers), args, kwargs)

    # Whatever makes other parameters of a module's own (`to`, `to_empty`, assignment, a copy) makes ones without hooks.

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        super(made, self)._apply(fn, recurse)
        complete_gradients(self)
        return self

    def register_parameter(self: Any, name: str, param: nn.Parameter | None) -> None:
        super(made, self).register_parameter(name, param)
        complete_gradients(self)

    def __setstate__(self: Any, state: Mapping[str, Any]) -> None:  # noqa: N807 - of the class below
        super(made, self).__setstate__(state)
        complete_gradients(self)

    members = {
        "forward": forward,
        "_apply": _apply,
        "register_parameter": register_parameter,
        "__setstate__": __setstate__,
        "unsharded_class": cls,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: Any = type(cls.__name__, (cls,), members)
    return made  # type: ignore[no-any-return]


def _wrapped(  # noqa: PLR0917 - as its wrappers are called
    module: Any, depth: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if depth == 0:
        if "own_forward" in module.__dict__:
            return module.own_forward(*args, **kwargs)
        return module.unsharded_class.forward(module, *args, **kwargs)

    def call(*inner_args: Any, **inner_kwargs: Any) -> Any:
        return _wrapped(module, depth - 1, inner_args, inner_kwargs)

    return module.forward_wrappers[depth - 1](module, call, args, kwargs)
