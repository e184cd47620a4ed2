"""A box of a named tensor, and the memory where a rank keeps it.

Bindings describe storage that is not one tensor to one name: fused, stacked, padded or permuted. How much of it they
reach is exact for any strides: every element is counted once, in a mask of bytes made for one storage at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Region

__all__ = ["Binding", "Bindings", "uncovered_by"]


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """The box `region` of the tensor `region.name` lives in `tensor`."""

    region: Region
    """Which box; its name is the Hugging Face name."""

    shape: tuple[int, ...]
    """Global shape of the named tensor."""

    tensor: Tensor
    """This rank's memory of the box: a view, of the region's shape."""

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.region.shape:
            raise ValueError(f"{self.region} is bound to a tensor of shape {list(self.tensor.shape)}")


Bindings = Callable[[nn.Module], Iterable[Binding]]
"""From a module to the boxes of named tensors that its storage holds."""


def uncovered_by(views: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The elements of each of `tensors` that no view reaches; names without any are left out.

    Views that are the same memory seen the same way, such as ties, count as one.

    Raises:
        RefitError: Two different views reach the same element.
    """
    by_storage: dict[int, dict[object, Tensor]] = {}
    for view in views:
        place = (view.storage_offset(), view.shape, view.stride(), view.dtype)
        by_storage.setdefault(view.untyped_storage().data_ptr(), {})[place] = view
    loose: dict[str, int] = {}
    for storage, seen in by_storage.items():
        inside = {name: tensor for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() == storage}
        mask = torch.zeros(next(iter(seen.values())).untyped_storage().nbytes(), dtype=torch.uint8)
        for view in seen.values():
            reached = _bytes_of(view, mask)
            if reached.numel() and int(reached.max()) > 0:
                raise RefitError(f"two bindings reach the same elements of {', '.join(inside) or 'one storage'}")
            reached.fill_(1)
        for name, tensor in inside.items():
            missing = int((_bytes_of(tensor, mask) == 0).any(dim=-1).sum())
            if missing:
                loose[name] = missing
    return loose


def _bytes_of(view: Tensor, mask: Tensor) -> Tensor:
    """The places of a view's bytes in a mask of its storage, whatever dtypes share that: [*shape, itemsize]."""
    size = view.element_size()
    strides = [size * stride for stride in view.stride()]
    return mask.as_strided((*view.shape, size), (*strides, 1), size * int(view.storage_offset()))
