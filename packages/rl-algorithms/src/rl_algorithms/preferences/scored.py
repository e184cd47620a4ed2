"""What a reward model learns from, as padded rows: pairs with margins, and answers with scores.

The score of a row is read at its last token: give every answer the end that it will have when it is judged.

Axes: B rows, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.contracts import Sums
from rl_algorithms.padding import pad
from rl_algorithms.preferences.pairs import Pair, pad_pairs

__all__ = [
    "PairExamples",
    "Scored",
    "ScoredAnswer",
    "ScoredExamples",
    "num_units",
    "prepare_pairs",
    "prepare_scored",
    "score_sums",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairExamples:
    """Pairs made ready for the loss: rows 2i chosen, 2i + 1 rejected."""

    rows_per_unit: ClassVar[int] = 2
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    margin: Float[Tensor, " B"]
    """By how much the chosen answer is better; the same in both rows of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredExamples:
    """Answers made ready for the loss, with the scores that they shall get."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    target: Float[Tensor, " B"]


Scored: TypeAlias = PairExamples | ScoredExamples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """An answer after its prompt, and what somebody thought of it.

    Raises:
        ValueError: there are no tokens, or the score is not finite.
    """

    tokens: tuple[int, ...]
    """Token ids of the prompt and the answer."""

    score: float
    """Higher is better."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a scored answer has no tokens; leave it out")
        if not math.isfinite(self.score):
            raise ValueError(
                f"score={self.score} of a row of {len(self.tokens)} tokens must be finite; leave the row out"
            )


def prepare_pairs(pairs: Sequence[Pair]) -> PairExamples:
    """Pad to one width."""
    padded = pad_pairs(pairs)
    margin = torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2)
    return PairExamples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer, margin=margin)


def prepare_scored(answers: Sequence[ScoredAnswer]) -> ScoredExamples:
    """Pad to one width.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("there are no scored answers to learn from")
    padded = pad([answer.tokens for answer in answers], answer_starts=[1] * len(answers))
    target = torch.tensor([answer.score for answer in answers])
    return ScoredExamples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer, target=target)


def num_units(examples: Scored) -> int:
    """How many pairs there are, or scored answers.

    Raises:
        ValueError: there are none.
    """
    if not len(examples.tokens):
        raise ValueError("there are no examples; a reward model needs at least one pair, or one scored answer")
    return len(examples.tokens) // examples.rows_per_unit


def score_sums(scores: Float[Tensor, " B"], examples: Scored) -> Sums:
    """What is logged of scores, added up over pairs or rows.

    Returns:
        `pair_accuracy` (of equal scores none is right), `score_margin`, `chosen_score` and `rejected_score` of pairs;
        `absolute_error`, `squared_error` and `score` of scored answers.
    """
    if isinstance(examples, ScoredExamples):
        error = scores - examples.target
        return {"absolute_error": error.abs().sum(), "squared_error": (error**2).sum(), "score": scores.sum()}
    chosen, rejected = scores[0::2], scores[1::2]
    return {
        "pair_accuracy": (chosen > rejected).float().sum(),
        "score_margin": (chosen - rejected).sum(),
        "chosen_score": chosen.sum(),
        "rejected_score": rejected.sum(),
    }
