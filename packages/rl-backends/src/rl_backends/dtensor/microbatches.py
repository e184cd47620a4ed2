"""How a batch is cut over data-parallel ranks and microbatches. Pure arithmetic on row indices.

Every rank gets the same number of microbatches, because the collectives of a sharded model must be entered by all ranks
equally often. A rank that has run out of rows repeats the first unit, and does not count it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["Microbatch", "TokenBatch", "cut"]


@runtime_checkable
class TokenBatch(Protocol):
    """What a backend needs to find in examples: a dataclass whose fields are tensors `[B]` or `[B, T]`."""

    rows_per_unit: ClassVar[int]
    """How many consecutive rows the loss needs together; cuts fall between such units only."""

    @property
    def tokens(self) -> Int[Tensor, "B T"]:
        """Token ids, right-padded."""

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each row that are not padding."""

    @property
    def trainable(self) -> Bool[Tensor, "B T"]:
        """The tokens whose log-probability the loss looks at; never the first of a row."""


BatchT = TypeVar("BatchT", bound=TokenBatch)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows of one forward and backward pass."""

    rows: Int[Tensor, " b"]
    """Indices along B."""

    width: int
    """Tokens of the longest of them: columns beyond are padding."""

    counted: bool
    """False for a repetition that only keeps this rank in step with the others."""

    def of(self, examples: BatchT, *, device: str) -> BatchT:
        """These rows of `examples`, on no more columns than they fill, on `device`."""
        instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
        taken = {
            field.name: _take(getattr(instance, field.name), self.rows, self.width).to(device)
            for field in fields(instance)
        }
        cut: BatchT = replace(instance, **taken)
        return cut


def cut(examples: TokenBatch, *, micro_batch_size: int, rank: int, num_ranks: int) -> Iterator[Microbatch]:
    """This rank's microbatches: units sorted by length, dealt to the ranks in turn, `micro_batch_size` rows at most.

    Sorting keeps rows of like length together, so that little padding is computed; dealing keeps the loads alike.

    Raises:
        ValueError: a first token is trainable, B is not a multiple of `rows_per_unit`, or a unit is larger than a
            microbatch.
    """
    unit, num_rows = examples.rows_per_unit, len(examples.lengths)
    if num_rows % unit or unit > micro_batch_size:
        raise ValueError(
            f"{num_rows} rows, of which {unit} belong together, cannot be cut into microbatches of {micro_batch_size} "
            f"rows; B must be a multiple of {unit}, and micro_batch_size at least {unit}"
        )
    if bool(examples.trainable[:, 0].any()):
        row = int(examples.trainable[:, 0].int().argmax())
        raise ValueError(f"row {row}: its first token is marked trainable, and nothing precedes it to predict it from")
    longest = examples.lengths.view(-1, unit).amax(dim=1)
    dealt = longest.argsort(descending=True, stable=True)[rank::num_ranks]
    units_each = micro_batch_size // unit
    num_microbatches = math.ceil(math.ceil(num_rows // unit / num_ranks) / units_each)
    for index in range(num_microbatches):
        units = dealt[index * units_each : (index + 1) * units_each]
        counted = len(units) > 0
        rows = (
            (units if counted else torch.zeros(1, dtype=torch.int64))[:, None] * unit + torch.arange(unit)
        ).flatten()
        yield Microbatch(rows, int(examples.lengths[rows].max()), counted)


def _take(tensor: Tensor, rows: Tensor, width: int) -> Tensor:
    return tensor[rows, :width] if tensor.ndim > 1 else tensor[rows]
