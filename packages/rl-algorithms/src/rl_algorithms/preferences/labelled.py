"""Single answers, each good or bad: from data to padded rows, and each prompt with another's answer.

KTO learns from them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxtyping import Bool
from torch import Tensor

from rl_algorithms.chat import Chat
from rl_algorithms.data import LabelledRow
from rl_algorithms.padding import PaddedRows, pad
from rl_algorithms.preferences.pairs import tokenized_answer

__all__ = ["LabelledAnswer", "answers_from_rows", "mismatched", "pad_answers", "require_both_labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledAnswer:
    """An answer after its prompt, and whether people want more of its kind.

    Raises:
        ValueError: there is no prompt, or no token to train on.
    """

    tokens: tuple[int, ...]
    """Token ids of the prompt and the answer."""

    trainable: tuple[bool, ...]
    """Which of them the policy said: none of the prompt, nor of what tools returned."""

    desirable: bool
    """The label."""

    def __post_init__(self) -> None:
        if len(self.trainable) != len(self.tokens):
            raise ValueError(
                f"trainable has {len(self.trainable)} marks for {len(self.tokens)} tokens; give one for each"
            )
        if not any(self.trainable) or self.trainable[0]:
            what = "a first token follows nothing" if any(self.trainable) else "there is no answer"
            raise ValueError(f"trainable={self.trainable} must be False of the prompt and True of an answer: {what}")

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the answer."""
        return self.tokens[: self.trainable.index(True)]


def answers_from_rows(rows: Iterable[LabelledRow], chat: Chat) -> list[LabelledAnswer]:
    """The rows as token ids.

    Raises:
        DataError: a row cannot be rendered or its answer not told from its prompt; it names the row.
    """
    made = []
    for row in rows:
        said = tokenized_answer(row, row.completion, chat)
        made.append(LabelledAnswer(tokens=said.tokens, trainable=said.trainable, desirable=row.label))
    return made


def mismatched(answers: Sequence[LabelledAnswer]) -> list[LabelledAnswer]:
    """Each prompt with the answer of the next row that has another prompt; after the last comes the first.

    Raises:
        ValueError: all prompts are the same, so that no answer is an answer to something else.
    """
    prompts = [answer.prompt for answer in answers]
    if len(set(prompts)) < 2:
        raise ValueError(
            f"the {len(answers)} answers have {len(set(prompts))} prompt, and KTO estimates how far the policy has "
            f"drifted from answers to other prompts; it needs at least two"
        )
    count = len(answers)
    partner = [0] * count
    for index in reversed(range(2 * count)):  # twice around: the partner of the last rows is among the first
        following = (index + 1) % count
        other = prompts[following] != prompts[index % count]
        partner[index % count] = following if other else partner[following]
    return [
        replace(
            answer,
            tokens=prompt + answers[other].tokens[len(prompts[other]) :],
            trainable=(False,) * len(prompt) + answers[other].trainable[len(prompts[other]) :],
        )
        for answer, prompt, other in zip(answers, prompts, partner, strict=True)
    ]


def pad_answers(answers: Sequence[LabelledAnswer]) -> PaddedRows:
    """Pad to one width; `answer` is True where the policy spoke.

    Raises:
        ValueError: there are no answers.
    """
    if not answers:
        raise ValueError("there are no answers to learn from")
    starts = [1] * len(answers)
    said = pad([[int(mark) for mark in answer.trainable] for answer in answers], answer_starts=starts)
    return replace(pad([answer.tokens for answer in answers], answer_starts=starts), answer=said.tokens.bool())


def require_both_labels(desirable: Bool[Tensor, " B"]) -> None:
    """Refuse data whose answers are all good, or all bad.

    Raises:
        ValueError: they are; then nothing holds the policy from raising, or sinking, whatever it says.
    """
    if desirable.all() or not desirable.any():
        raise ValueError(
            f"all {len(desirable)} answers have desirable={bool(desirable.all())}, and KTO learns from the difference; "
            f"add answers of the other kind, or imitate good ones by sft"
        )
