"""How a style changes what a module computes: wrappers around its forward, and nothing else.

A wrapper is a function of (module, call, *args, **kwargs) that returns the output; `call` is the forward, or the
wrapper inside this one. What it needs between entrance and exit are its own local variables, so nothing is left on a
module by an exception or by a recomputation, and torch.compile traces it like the model's own code. `Communication` is
a wrapper that changes values alone: what most modules exchange with other ranks.

The module's class becomes a subclass, made once for each class, as FSDP2's does: hooks have ids that differ from layer
to layer, on which torch.compile would compile each layer anew until it gives up. Hooks, FSDP2's among them, run around
all wrappers.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_map

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.sharding.activation_checkpointing import without_recomputation
from rl_parallel_plans.styles.partial_gradients import complete_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Counts = dict[str, int]
"""How often each collective runs."""
Call = Callable[..., Any]
Exchange = Callable[..., Any]
"""Of a value, and `mesh` by name."""


class Wrapper(Protocol):
    """What runs in place of a forward, and calls it."""

    def __call__(self, module: nn.Module, call: Call, /, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102


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


def _wrapped(module: Any, depth: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: PLR0917
    if depth == 0:
        if "own_forward" in module.__dict__:
            return module.own_forward(*args, **kwargs)
        return module.unsharded_class.forward(module, *args, **kwargs)

    def call(*inner_args: Any, **inner_kwargs: Any) -> Any:
        return _wrapped(module, depth - 1, inner_args, inner_kwargs)

    return module.forward_wrappers[depth - 1](module, call, *args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What a module exchanges with the other ranks around its forward."""

    enter: Exchange | None = None
    """What becomes of each argument."""
    leave: Exchange | None = None
    """What becomes of the output, or of the first of several."""
    forward: Counts = field(default_factory=dict)
    """How often each collective runs forward."""
    backward: Counts = field(default_factory=dict)
    """How often each collective runs backward."""

    def wrap(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Let the module communicate over `mesh` so."""
        enter, leave = (None if each is None else partial(each, mesh=mesh) for each in (self.enter, self.leave))
        wrap_forward(module, partial(_communicating, enter=enter, leave=leave))


def _communicating(
    _module: nn.Module, call: Call, /, *args: Any, enter: Exchange | None, leave: Exchange | None, **kwargs: Any
) -> Any:
    if enter is not None:
        args, kwargs = tuple([enter(each) for each in args]), {name: enter(each) for name, each in kwargs.items()}
    output = call(*args, **kwargs)
    if leave is None:
        return output
    if isinstance(output, tuple | list):  # what else is returned is left alone
        return type(output)([leave(output[0]), *output[1:]])
    return leave(output)


def sum_over_ranks(term: Tensor, mesh: "DeviceMesh") -> Tensor:
    """The sum of each rank's `term`, whose gradient each term takes as it is.

    A tensor of its own, where DTensor's `to_local` is a view that a model must not change in place.
    """
    whole: Tensor = _SumOverRanks.apply(term, mesh.get_group())  # type: ignore[no-untyped-call]
    return whole


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, term: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A functional collective: selective checkpointing sees it, and saves its result.
        reduced = funcol.all_reduce(term.contiguous(), "sum", group)
        whole: Tensor = funcol.wait_tensor(reduced)  # type: ignore[no-untyped-call]
        return whole

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def with_summed_gradient(whole: Tensor, mesh: "DeviceMesh") -> Tensor:
    """What every rank holds whole, its gradient the sum of all ranks'."""
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def gathered(value: DTensor, *, summed: bool) -> Tensor:
    """The whole as a plain tensor; `summed`: whether its gradients on the ranks are terms of a sum, and not equal."""
    whole = value.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial() if summed else Replicate()])


def cut_sequence(whole: Tensor, mesh: "DeviceMesh") -> DTensor:
    """This rank's positions of [B, S, H], or of several stacked, that every rank holds whole."""
    stream = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return stream.redistribute(placements=[Shard(whole.ndim - 2)])


def needs_gradient(value: object) -> bool:
    """Whether a backward will reach the value."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _sum_input_gradients(value: Any, mesh: "DeviceMesh") -> Any:
    return tree_map(lambda each: with_summed_gradient(each, mesh) if needs_gradient(each) else each, value)


def _features(value: Any, mesh: "DeviceMesh") -> Any:
    if not isinstance(value, Tensor) or is_dtensor(value):
        return value
    return DTensor.from_local(value, mesh, [Shard(value.ndim - 1)], run_check=False)


def _gather_features(value: Any, mesh: "DeviceMesh") -> Any:
    return gathered(_features(value, mesh), summed=True) if isinstance(value, Tensor) else value


def _own_features(output: Any, mesh: "DeviceMesh") -> Any:
    del mesh
    # A tensor of its own: models change it in place (OLMoE's clip_qkv), which a view of a DTensor must not be.
    return output.to_local().clone() if is_dtensor(output) else output


def _share(output: Tensor, mesh: "DeviceMesh") -> Tensor:
    return output / mesh.size()


SUM_INPUT_GRADIENTS = Communication(enter=_sum_input_gradients, backward={"all_reduce": 1})
SUM_OUTPUT = Communication(leave=sum_over_ranks, forward={"all_reduce": 1})
SHARE_OUTPUT = Communication(leave=_share)
"""What every rank computes alike, in a block whose outputs are summed: an equal share each."""
GATHER_FEATURES = Communication(enter=_gather_features)
"""Counted by the block whose output is made of features."""
OVER_ALL_FEATURES = Communication(
    enter=_features, leave=_own_features, forward={"all_reduce": 1}, backward={"reduce_scatter": 1}
)
"""DTensor computes a mean over features that are shared out; backward it sums before it cuts."""
