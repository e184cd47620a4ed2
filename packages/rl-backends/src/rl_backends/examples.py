"""What a backend needs to find in the examples that it is given; the loss may find more in them.

Axes: B rows, T tokens, K tokens of the vocabulary that are asked about in one place.
"""

from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rl_backends.errors import BatchError


@runtime_checkable
class TokenBatch(Protocol):
    """A dataclass of tensors: [B], or [B, T, ...], which are cut along their tokens.

    A field [B, n, ...] that is of rows is named in `row_fields: ClassVar[tuple[str, ...]]` of the class, and not cut.

    For the output "logp_of_token_ids" one of them is `token_ids` [B, T, K]: K tokens of the
    vocabulary for each trainable token's place.
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


def token_ids_of(examples: TokenBatch) -> Tensor | None:
    """`examples.token_ids`; None where there are none."""
    found = getattr(examples, "token_ids", None)
    return found if isinstance(found, Tensor) else None


def require_token_ids(examples: TokenBatch, *, vocabulary_size: int) -> None:
    """Refuse `examples.token_ids` that are absent or unknown to the model; places that do not train may hold any."""
    token_ids = token_ids_of(examples)
    if token_ids is None:
        raise BatchError(
            f"output='logp_of_token_ids' is of examples.token_ids [B, T, K], and {type(examples).__qualname__} has no "
            f"tensor of that name: give it the tokens to ask about, such as teacher.topk_logits(examples, k).token_ids"
        )
    shape, tokens = tuple(token_ids.shape), tuple(examples.tokens.shape)
    if len(shape) != 3 or shape[:2] != tokens or not shape[2] or token_ids.dtype not in {torch.int64, torch.int32}:
        raise BatchError(
            f"token_ids are {token_ids.dtype} {list(shape)}, and tokens {list(tokens)}: token_ids must be integers "
            f"[B, T, K], K of the vocabulary for each token, K at least 1"
        )
    asked = token_ids[examples.trainable.to(token_ids.device)]
    if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < vocabulary_size:
        wrong = (token_ids < 0) | (token_ids >= vocabulary_size)
        row, column, word = (wrong & cast("Any", examples.trainable)[..., None].to(wrong.device)).nonzero()[0].tolist()
        raise BatchError(
            f"row {row}: token_ids of token {column} have the id {int(token_ids[row, column, word])}, and the model's "
            f"ids are from 0 to {vocabulary_size - 1}: is the teacher of another vocabulary?"
        )
