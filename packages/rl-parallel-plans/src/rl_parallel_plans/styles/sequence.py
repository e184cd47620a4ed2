"""Styles of sequence parallelism: where the residual stream is cut along the sequence, and what must see it whole.

SplitSequence             the first decoder layer, and what enters others beside the stream
SequenceShardedParallel   a module between blocks, on this rank's positions; the last one gathers them
WholeParallel             a block that every rank computes whole, on the whole sequence
WholeLayer                a layer on the whole sequence, between layers that hand on a stream cut along it
WholeMethod               a method that a model calls between layers on the whole stream
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.styles.forward import Call, Communication, Counts, cut_sequence, gathered, wrap_forward
from rl_parallel_plans.styles.modules import ReplicatedParallel
from rl_parallel_plans.styles.table import (
    REPLICATED,
    REPLICATED_PARTIAL,
    LocalParameters,
    ParameterRule,
    every,
    own_names,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, repr=False)
class SplitSequence(LocalParameters):
    """Cut arguments [B, S, ...] of a layer along the sequence, and let its buffers meet DTensors.

    arguments: names in the layer's forward; one that is absent or None is left alone, as is what is cut already.
        Gemma 4 hands each layer an input of its own, and multiplies the stream by a buffer of the layer.
    """

    arguments: tuple[str, ...] = ("hidden_states",)

    def collectives(self) -> tuple[Counts, Counts]:
        """The gradient of what is before the layers is whole."""
        return {}, {"all_gather": len(self.arguments)}

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Cut what enters."""
        names = list(inspect.signature(module.forward).parameters)
        places = {name: names.index(name) if name in names else 0 for name in self.arguments}  # the stream comes first
        wrap_forward(module, partial(_with_cut_inputs, mesh=mesh, places=places))


@dataclass(eq=False, repr=False)
class SequenceShardedParallel(LocalParameters):
    """Run a module that treats each position by itself (a norm, a linear layer) on this rank's part of the sequence.

    gather: hand the output on whole and plain: where the residual stream ends.

    Input and output are DTensors Shard(1); the module sees plain tensors. Each rank sees its positions only, so that
    the gradient of what is whole is one term of a sum. Raises PlanError for an input that is not cut.
    """

    gather: bool = False
    table = every(REPLICATED_PARTIAL)

    def collectives(self) -> tuple[Counts, Counts]:
        """Where it gathers, one all-gather forward."""
        return ({"all_gather": 1} if self.gather else {}), {}

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Take the local positions, and put the output in place of them."""
        wrap_forward(module, partial(_on_positions, mesh=mesh, gather=self.gather))


@dataclass(eq=False, repr=False, kw_only=True)
class WholeParallel(ReplicatedParallel):
    """A block that every rank computes whole, on the whole sequence: where no exact way to share it out is known.

    sequence_parallel: whether the residual stream outside is cut along the sequence. It is gathered on the way in and
        cut on the way out; every rank's gradients are whole.
    """

    reads_inside: bool = field(default=True, repr=False)
    sequence_parallel: bool = False

    def communications(self) -> tuple[Communication, ...]:
        """Gather and cut the stream."""
        return _whole_stream(gather=True, cut=True) if self.sequence_parallel else ()


@dataclass(eq=False, repr=False)
class ReadsInside(LocalParameters):
    """A layer that calls other methods of its children than forward: in these, the children are whole and plain."""

    children: tuple[str, ...]

    def inside(self, module: nn.Module) -> Iterable[tuple[nn.Module, Mapping[str, ParameterRule]]]:
        """The children and what is in them."""
        read = [part for name in self.children for part in module.get_submodule(name).modules()]
        return [(part, dict.fromkeys(own_names(part), REPLICATED)) for part in read]


@dataclass(eq=False, repr=False, kw_only=True)
class WholeLayer(ReadsInside):
    """Gather the residual stream where a layer begins and cut it along the sequence where it ends.

    For layers whose code mixes the stream itself: one that flattens [B, S, H] to [B * S, H] and calls its router and
    experts one by one (Gemma 4), its two linear layers (OPT), or keeps several streams (Gemma 3n), and for models that
    do more with the stream between their layers than hand it on. The layer's own blocks are those of a plan without
    sequence parallelism.

                            forward        backward
        layer  entrance     all-gather     nothing (its own part of a whole gradient)
               exit         nothing        all-gather

    What is kept between layers is a tp-th of the stream: with full recomputation, all that is kept of it.

    first, last: whether the stream is whole before it, and after it: a model's code around the layers meets plain
        tensors.
    why: what its code, or that around the layers, does that a rank cannot do on a part of the sequence.
    elements_per_token: of the stream: the hidden size, or several times that.
    children: those of which the layer calls other methods than forward.
    """

    first: bool
    last: bool
    why: str = field(repr=False)
    elements_per_token: int = field(repr=False)
    children: tuple[str, ...] = ()

    def communications(self) -> tuple[Communication, ...]:
        """One all-gather forward where the stream comes cut, and one backward where it goes on cut."""
        return _whole_stream(gather=not self.first, cut=not self.last)


@dataclass(eq=False, repr=False)
class WholeMethod(LocalParameters):
    """Let the method `name` of a module see the whole residual stream, its first argument and its result.

    Qwen3-VL's `_deepstack_process` adds features of an image to some positions between layers. Every rank computes the
    same, so that gradients are whole on each.
    """

    name: str

    def communicate(self, module: nn.Module, mesh: "DeviceMesh") -> None:
        """Gather and cut around the method."""
        method = getattr(type(module), self.name)
        module.__dict__[self.name] = partial(_method_on_whole, method, module, mesh=mesh)


def _whole_stream(*, gather: bool, cut: bool) -> tuple[Communication, ...]:
    """Whole plain tensors inside, whose gradients are whole on each rank; outside, this rank's part again."""
    return (
        Communication(
            enter=_gather if gather else None,
            leave=cut_sequence if cut else None,
            forward={"all_gather": 1} if gather else {},
            backward={"all_gather": 1} if cut else {},
        ),
    )


def _gather(value: Any, mesh: "DeviceMesh") -> Any:
    if isinstance(value, tuple):
        return tuple([_gather(each, mesh) for each in value])
    # A tensor of its own: a layer may change it in place, which a view of a DTensor must not be.
    return gathered(value, summed=False).clone() if is_dtensor(value) else value


def _with_cut_inputs(
    module: nn.Module, call: Call, /, *args: Any, mesh: "DeviceMesh", places: Mapping[str, int], **kwargs: Any
) -> Any:
    def cut(value: Any) -> Any:
        return cut_sequence(value, mesh) if isinstance(value, Tensor) and not is_dtensor(value) else value

    positions = set(places.values())
    named = {name: cut(value) if name in places else value for name, value in kwargs.items()}
    given = [cut(value) if place in positions else value for place, value in enumerate(args)]
    # An entry of the instance's __dict__ hides the buffer of the same name, which stays plain.
    names = [name for name, _ in module.named_buffers(recurse=False) if name not in module.__dict__]
    try:
        for name in names:
            module.__dict__[name] = DTensor.from_local(module.get_buffer(name), mesh, [Replicate()], run_check=False)
        return call(*given, **named)
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def _on_positions(
    module: nn.Module, call: Call, /, *args: Any, mesh: "DeviceMesh", gather: bool, **kwargs: Any
) -> Tensor:
    if not args or not is_dtensor(args[0]):
        raise PlanError(
            f"{type(module).__name__} was planned for a residual stream that is cut along the sequence, and its input "
            "is whole: its model does not call it where the plan assumes; plan with sequence_parallel=False"
        )
    length = args[0].shape[1]
    output = call(*[value.to_local() if is_dtensor(value) else value for value in args], **kwargs)
    shape = (output.shape[0], length, *output.shape[2:])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    positions = DTensor.from_local(output, mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)  # type: ignore[arg-type]
    return positions.redistribute(placements=[Replicate()]).to_local() if gather else positions


def _method_on_whole(
    method: Callable[..., Tensor], module: nn.Module, hidden: Tensor, *args: Any, mesh: "DeviceMesh", **kwargs: Any
) -> Tensor:
    return cut_sequence(method(module, _gather(hidden, mesh), *args, **kwargs), mesh)
