"""Rows of a batch that one forward and backward pass works on.

Axes: B rows of the batch, b of the microbatch, T tokens of the longest row of the batch.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, cast

from jaxtyping import Int
from torch import Tensor

from rl_backends.examples import BatchT

__all__ = ["Microbatch", "moved"]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Which rows, and whether they count."""

    rows: Int[Tensor, " b"]
    """Indices along B."""

    width: int
    """Tokens of the longest of them: columns beyond are padding."""

    counted: bool
    """False for a repetition that only keeps this rank in step with the others."""

    def of(self, examples: BatchT, *, device: str) -> BatchT:
        """These rows of `examples`, on no more columns than they fill, on `device`."""
        instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
        length = instance.tokens.shape[1]
        taken = {
            field.name: _take(getattr(instance, field.name), self.rows, width=self.width, length=length).to(device)
            for field in fields(instance)
        }
        cut: BatchT = replace(instance, **taken)
        return cut


def moved(examples: BatchT, *, device: str) -> BatchT:
    """The same examples on `device`; themselves where they are there."""
    instance = cast("Any", examples)
    tensors = {field.name: getattr(instance, field.name) for field in fields(instance)}
    if all(tensor.device.type == device for tensor in tensors.values()):
        return examples
    there: BatchT = replace(instance, **{name: tensor.to(device) for name, tensor in tensors.items()})
    return there


def _take(tensor: Tensor, rows: Tensor, *, width: int, length: int) -> Tensor:
    along_tokens = tensor.ndim > 1 and tensor.shape[1] == length
    return tensor[rows, :width] if along_tokens else tensor[rows]
