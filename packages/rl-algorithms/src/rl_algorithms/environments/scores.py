"""What a verifier says of one answer: a float that may carry figures for the log, or the reason why it is none.

A `Score` is a float, so a function that returns scores still is a reward function of TRL's kind.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["CannotJudgeError", "Score", "takes_text"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class CannotJudgeError(ValueError):
    """A verifier that could judge no answer at all, on this machine as it is; it stops the run, whatever is asked."""


def takes_text(function: FunctionT) -> FunctionT:
    """Mark a reward function that is given `prompts` and `completions` as text, whatever form the data's prompts have.

    Others are given lists of messages where the data's prompts are messages, as TRL gives them.
    """
    function.takes_text = True  # type: ignore[attr-defined]
    return function


class Score(float):
    """A reward with what else is to be said of the answer.

    >>> Score(1.0, metrics={"unparsed": 0.0}) + 1.0
    2.0

    Args:
        value: the reward.
        metrics: numbers for the log by name, averaged over answers.
        failed: why the answer could not be judged, through no fault of the policy; then use `Score.failure`.
    """

    metrics: Mapping[str, float]
    failed: str | None

    def __new__(  # noqa: PYI034 - a checker that decorates methods one by one does not know whose Self it is
        cls, value: float, *, metrics: Mapping[str, float] | None = None, failed: str | None = None
    ) -> "Score":
        """A float cannot be changed after it is made, and so takes its figures here."""
        score = super().__new__(cls, value)
        score.metrics = {} if metrics is None else metrics
        score.failed = failed
        return score

    @classmethod
    def failure(cls, reason: str, *, metrics: Mapping[str, float] | None = None) -> "Score":
        """The score of an answer that cannot be judged: NaN, which no mean takes for a reward by accident."""
        return cls(math.nan, metrics=metrics, failed=reason)
