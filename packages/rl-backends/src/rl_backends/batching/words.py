"""The words that a loss asks about in each trainable token's place: `examples.token_ids`, looked at before any forward.

What stands in places that are not trainable is never looked at.

Axes: B rows, T tokens, K words.
"""

from typing import Any, cast

import torch
from torch import Tensor

from rl_backends.errors import BatchError
from rl_backends.examples import TokenBatch

__all__ = ["require_token_ids", "token_ids_of"]


def token_ids_of(examples: TokenBatch) -> Tensor | None:
    """`examples.token_ids`; None where there are none."""
    found = getattr(examples, "token_ids", None)
    return found if isinstance(found, Tensor) else None


def require_token_ids(examples: TokenBatch, *, vocabulary_size: int) -> None:
    """Whether every trainable token has words, and the model knows them.

    Raises:
        BatchError: the examples have no `token_ids`, they are no ids of [B, T, K], or one of a trainable token is
            outside the vocabulary.
    """
    token_ids = token_ids_of(examples)
    if token_ids is None:
        raise BatchError(
            f"output='logp_of_token_ids' is of examples.token_ids [B, T, K], and {type(examples).__qualname__} has no "
            f"tensor of that name: give it the words to ask about, such as teacher.topk_logits(examples, k).token_ids"
        )
    shape, tokens = tuple(token_ids.shape), tuple(examples.tokens.shape)
    if len(shape) != 3 or shape[:2] != tokens or not shape[2] or token_ids.dtype not in {torch.int64, torch.int32}:
        raise BatchError(
            f"token_ids are {token_ids.dtype} {list(shape)}, and tokens {list(tokens)}: token_ids must be integers "
            f"[B, T, K], K words for each token, K at least 1"
        )
    asked = token_ids[examples.trainable.to(token_ids.device)]
    if asked.numel() and not 0 <= int(asked.min()) <= int(asked.max()) < vocabulary_size:
        wrong = (token_ids < 0) | (token_ids >= vocabulary_size)
        row, column, word = (wrong & cast("Any", examples.trainable)[..., None].to(wrong.device)).nonzero()[0].tolist()
        raise BatchError(
            f"row {row}: token_ids of token {column} have the id {int(token_ids[row, column, word])}, and the model's "
            f"ids are from 0 to {vocabulary_size - 1}: is the teacher of another vocabulary?"
        )
