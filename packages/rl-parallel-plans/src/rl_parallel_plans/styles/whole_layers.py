"""A decoder layer that computes on the whole sequence, between layers that hand on a residual stream cut along it.

For layers whose code mixes the residual stream itself: one that flattens [B, S, H] to [B * S, H] and calls its router
and experts one by one (Gemma 4), its two linear layers (OPT), or keeps several streams (Gemma 3n), and for models that
do more with the stream between their layers than hand it on. The stream is gathered where a layer begins and cut where
it ends; the layer's own blocks are those of a plan without sequence parallelism.

                        forward        backward
    layer  entrance     all-gather     nothing (its own part of a whole gradient)
           exit         nothing        all-gather

What is kept between layers is a tp-th of the stream: with full recomputation, all that is kept of it. The first layer
takes and the last returns the whole stream, so that a model's code around the layers meets plain tensors.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.styles.layer_inputs import LayerReads
from rl_parallel_plans.styles.sharded_forward import wrap_forward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Counts = dict[str, int]


class WholeLayer(LayerReads):
    """Gather the residual stream where a layer begins and cut it along the sequence where it ends.

    first, last: whether the stream is whole before it, and after it.
    why: what its code, or that around the layers, does that a rank cannot do on a part of the sequence.
    elements_per_token: of the stream: the hidden size, or several times that.
    children: those of which the layer calls other methods than forward, as for `LayerReads`.
    """

    def __init__(
        self, *, first: bool, last: bool, why: str, elements_per_token: int, children: Sequence[str] = ()
    ) -> None:
        super().__init__(children)
        self.first, self.last, self.why = first, last, why
        self.elements_per_token = elements_per_token

    def collectives(self) -> "tuple[Counts, Counts]":
        """One all-gather forward where the stream comes cut, and one backward where it goes on cut."""
        return ({} if self.first else {"all_gather": 1}), ({} if self.last else {"all_gather": 1})

    def _apply(self, module: nn.Module, device_mesh: "DeviceMesh") -> nn.Module:
        super()._apply(module, device_mesh)
        # Not by hooks: what `apply_activation_checkpointing` keeps of a layer is its part of the stream.
        wrap_forward(module, partial(_on_whole_stream, mesh=device_mesh, gather=not self.first, cut=not self.last))
        return module

    def __repr__(self) -> str:
        ends = [name for name, is_so in (("first", self.first), ("last", self.last)) if is_so]
        return f"{type(self).__name__}({', '.join([*ends, *self.children])})"


def _on_whole_stream(
    _module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    mesh: "DeviceMesh",
    gather: bool,
    cut: bool,
) -> Any:
    if gather:
        args, kwargs = tuple(map(_gathered, args)), {name: _gathered(value) for name, value in kwargs.items()}
    output = call(*args, **kwargs)
    if not cut:
        return output
    if isinstance(output, tuple | list):
        return type(output)([_part(output[0], mesh), *output[1:]])
    return _part(output, mesh)


def _gathered(value: Any) -> Any:
    if not is_dtensor(value):
        return value
    whole = value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
    # A tensor of its own: a layer may change it in place, which a view of a DTensor must not be.
    return whole.clone()


def _part(stream: Tensor, mesh: "DeviceMesh") -> DTensor:
    whole = DTensor.from_local(stream, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(stream.ndim - 2)])  # [B, S, H], or several of them stacked
