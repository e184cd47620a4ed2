"""Rows, and what a teacher says of each of their tokens.

Axes: B rows, T tokens, K words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.contracts import Conversation, EnvironmentReturn, Teacher, TokenBatch

__all__ = ["Examples", "NoReward", "Rows", "prepare"]

ROUNDING = 1e-3
"""How far above 0 a log-probability may be: a certain word's, in bfloat16, is 0 give or take its rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a teacher is asked about."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """The same rows with what it said."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]

    token_ids: Int[Tensor, "B T K"]
    """The words that it finds most probable in each trainable token's place."""

    logp_teacher: Float[Tensor, "B T K"]
    """Their log-probabilities, normalised over the whole vocabulary."""


class NoReward:
    """An environment that ends each conversation after one answer, and has no opinion of it."""

    def step(self, conversations: Sequence[Conversation]) -> list[EnvironmentReturn]:
        """Reward 0 for every answer."""
        return [EnvironmentReturn(reward=0.0, terminated=True) for _ in conversations]


def prepare(rows: TokenBatch, teacher: Teacher, *, k: int) -> Examples:
    """Ask the teacher for the `k` words that it finds most probable in the place of each trainable token.

    Args:
        rows: those of every rank.
        teacher: of the student's tokenizer, at the temperature at which the student is trained.
        k: how many.

    Raises:
        ValueError: it said something that is no log-probability; the message names row and token.
    """
    top = teacher.topk_logits(rows, k)
    wrong = (rows.trainable & ~(top.logp <= ROUNDING).all(-1)).nonzero()  # NaN too
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"what the teacher says in the place of row {row}, token {token} are no log-probabilities: "
            f"{top.logp[row, token].tolist()}; they must be numbers of at most 0"
        )
    return Examples(
        tokens=rows.tokens,
        lengths=rows.lengths,
        trainable=rows.trainable,
        token_ids=top.token_ids,
        logp_teacher=top.logp,
    )
