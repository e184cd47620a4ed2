"""A box of a named tensor, and the memory where a rank keeps it.

Bindings describe storage that is not one tensor to one name: fused, stacked, padded or permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from rl_refit.layout import Region

__all__ = ["Binding", "Bindings"]


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
