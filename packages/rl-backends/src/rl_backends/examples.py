"""What a backend needs to find in the examples that it is given; the loss may find more in them.

Axes: B rows, T tokens.
"""

from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["BatchT", "TokenBatch"]


@runtime_checkable
class TokenBatch(Protocol):
    """A dataclass of tensors: [B], or [B, T, ...], which are cut along their tokens.

    A field [B, n, ...] that is of rows is named in `row_fields: ClassVar[tuple[str, ...]]` of the class, and not cut.

    For the output "logp_of_token_ids" one of them is `token_ids` [B, T, K]: K words for each trainable token's place.
    """

    rows_per_unit: ClassVar[int]
    """How many consecutive rows the loss needs together; cuts fall between such units only."""

    @property
    def tokens(self) -> Int[Tensor, "B T"]:
        """Token ids, right-padded."""

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens of each row that are not padding; at least 1."""

    @property
    def trainable(self) -> Bool[Tensor, "B T"]:
        """The tokens whose log-probability the loss looks at; never the first of a row, never padding."""


BatchT = TypeVar("BatchT", bound=TokenBatch)
