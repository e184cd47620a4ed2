"""The memory under a model's and an optimizer's tensors: each storage once, whatever looks at it.

Sees through DTensors and other wrappers (quantised optimizer states) to the plain tensors that hold bytes, and through
what stands in for weights that are offloaded to those weights. Moves nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Held", "held_storages", "named_parameters", "optimizer_tensors", "plain_tensors"]


@dataclass(frozen=True, slots=True)
class Held:
    """A storage, and the first tensor that was found to use it."""

    name: str
    """Of the tensor, for messages."""

    storage: torch.UntypedStorage
    """Its memory."""

    device: torch.device
    """Where it lies."""

    num_bytes: int
    """Its size when it was found."""

    @property
    def bytes(self) -> Tensor:
        """All of it as uint8 [num_bytes]; a view, not a copy."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


def held_storages(tensors: Iterable[tuple[str, Tensor]], *, seen: set[int] | None = None) -> Iterator[Held]:
    """Each storage under `tensors` once; those without bytes, and those on the meta device, not at all.

    Args:
        tensors: with a name each.
        seen: storages that are left out; those found are added.
    """
    seen = set() if seen is None else seen
    for name, tensor in tensors:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            identity = storage._cdata  # noqa: SLF001 - what torch itself tells storages apart by
            if identity not in seen and storage.nbytes() and plain.device.type != "meta":
                seen.add(identity)
                yield Held(name, storage, plain.device, storage.nbytes())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that `tensor` consists of: itself, unless it wraps others."""
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield tensor
        return
    for name in wrapper.__tensor_flatten__()[0]:
        inner = getattr(wrapper, name)
        if isinstance(inner, Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(inner)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `model`, a tied one once; of weights that are offloaded, themselves and not their stand-ins."""
    return [(name, getattr(parameter, "stands_for", parameter)) for name, parameter in model.named_parameters()]


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of each optimizer's state, named for messages."""
    for optimizer in optimizers:
        for number, state in enumerate(optimizer.state.values()):
            yield from _inside(state, f"{type(optimizer).__name__} state {number}")


def _inside(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _inside(each, f"{name} {key}")
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _inside(each, name)
