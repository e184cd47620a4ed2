"""Rows, and what a teacher says of each of their tokens.

Axes: B rows, T tokens, K words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.contracts import Conversation, EnvironmentReturn, Teacher, TokenBatch

__all__ = ["Examples", "NoReward", "Rows", "RowsOfBoth", "prepare"]

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
class RowsOfBoth:
    """The student's rows, and the same responses after another prompt: `self_distillation` makes them."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]

    teacher_tokens: Int[Tensor, "B S"]
    """The teacher's prompt, then all that follows the student's."""

    teacher_lengths: Int[Tensor, " B"]
    """Tokens of each of these rows that are not padding."""

    shift: Int[Tensor, " B"]
    """How many tokens the teacher's prompt has more than the student's; may be below 0."""


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
        rows: those of every rank. Of `RowsOfBoth` the teacher is asked about its own rows.
        teacher: of the student's tokenizer, at the temperature at which the student is trained.
        k: how many.

    Raises:
        ValueError: it said something that is no log-probability; the message names row and token.
    """
    if isinstance(rows, RowsOfBoth):
        logp, token_ids = _after_its_own_prompt(rows, teacher, k=k)
    else:
        top = teacher.topk_logits(rows, k)
        logp, token_ids = top.logp, top.token_ids
    wrong = (rows.trainable & ~(logp <= ROUNDING).all(-1)).nonzero()  # NaN too
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"what the teacher says in the place of row {row}, token {token} are no log-probabilities: "
            f"{logp[row, token].tolist()}; they must be numbers of at most 0"
        )
    return Examples(
        tokens=rows.tokens,
        lengths=rows.lengths,
        trainable=rows.trainable,
        token_ids=token_ids,
        logp_teacher=logp,
    )


def _after_its_own_prompt(rows: RowsOfBoth, teacher: Teacher, *, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids [B, T, K] of what the teacher says in its rows, at the same tokens in the student's."""
    width, own_width = rows.tokens.shape[1], rows.teacher_tokens.shape[1]
    in_students = torch.arange(own_width) - rows.shift[:, None]
    trainable = rows.trainable.gather(1, in_students.clamp(0, width - 1))
    trainable &= (in_students >= 0) & (in_students < width)
    top = teacher.topk_logits(Rows(tokens=rows.teacher_tokens, lengths=rows.teacher_lengths, trainable=trainable), k)
    in_teachers = (torch.arange(width) + rows.shift[:, None]).clamp(0, own_width - 1)[..., None].expand(-1, -1, k)
    logp, token_ids = (each.gather(1, in_teachers.to(each.device)) for each in (top.logp, top.token_ids))
    mask = rows.trainable[..., None]
    return torch.where(mask, logp, 0.0), torch.where(mask, token_ids, 0)
