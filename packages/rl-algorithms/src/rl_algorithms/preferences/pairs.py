"""Pairs of answers, one preferred to the other: from rollouts or from data, to padded rows.

DPO, ORPO and the reward model learn from them; each makes its own examples of the padded rows.

Axes: B = 2 * pairs rows, 2i chosen and 2i + 1 rejected; T tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rl_algorithms.chat import Chat, TokenizedConversation
from rl_algorithms.contracts import Message
from rl_algorithms.data import DataError, LabelledRow, PreferenceRow
from rl_algorithms.padding import PaddedRows, pad
from rl_algorithms.rollouts import Rollouts

__all__ = [
    "Pair",
    "pad_pairs",
    "pairs_from_rollouts",
    "pairs_from_rows",
    "require_answers",
    "rows_of_pairs",
    "tokenized_answer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt, each with the prompt before it.

    Raises:
        ValueError: there is no prompt, an answer has no token to train on, or the two follow different prompts.
    """

    chosen: tuple[int, ...]
    """Token ids of the prompt and the better answer."""

    rejected: tuple[int, ...]
    """Token ids of the prompt and the worse answer."""

    prompt_length: int
    """How many tokens of both are the prompt."""

    chosen_trainable: tuple[bool, ...] | None = None
    """Which of `chosen` the policy said, where observations stand between; None for all after the prompt."""

    rejected_trainable: tuple[bool, ...] | None = None
    """The same of `rejected`."""

    margin: float = 0.0
    """How much better, where the data says so: the score that a reward model shall put between them."""

    def __post_init__(self) -> None:
        if self.prompt_length < 1:
            raise ValueError(f"prompt_length={self.prompt_length} must be >= 1: a first token follows nothing")
        if self.chosen[: self.prompt_length] != self.rejected[: self.prompt_length]:
            raise ValueError(
                f"the chosen and the rejected answer follow different prompts: {self.chosen[: self.prompt_length]} and "
                f"{self.rejected[: self.prompt_length]}; a pair is two answers to one prompt"
            )
        if not math.isfinite(self.margin):
            raise ValueError(f"margin={self.margin} must be finite; leave it out where it is not known")
        for name in ("chosen", "rejected"):
            tokens, mask = getattr(self, name), getattr(self, f"{name}_trainable")
            if mask is not None and len(mask) != len(tokens):
                raise ValueError(f"{name}_trainable has {len(mask)} marks for {len(tokens)} tokens; give one for each")
            if not any(_marks(tokens, mask, self.prompt_length)):
                raise ValueError(
                    f"the {name} answer has no token to train on: {len(tokens)} tokens, of which prompt_length="
                    f"{self.prompt_length} are the prompt; an answer has at least its stop token"
                )


def pairs_from_rows(rows: Iterable[PreferenceRow], chat: Chat) -> list[Pair]:
    """The rows as token ids. What both renderings have before the first answered token is the prompt.

    Raises:
        DataError: a row cannot be rendered, its answers not told from its prompt, or not from one another; it names
            the row.
    """
    pairs = []
    for row in rows:
        chosen, rejected = (tokenized_answer(row, answer, chat) for answer in (row.chosen, row.rejected))
        if chosen.tokens == rejected.tokens:
            raise DataError(
                f"{row.where}: 'chosen' and 'rejected' are the same tokens, so that neither can be preferred; leave "
                f"the row out"
            )
        try:
            pair = Pair(
                chosen=chosen.tokens,
                rejected=rejected.tokens,
                prompt_length=min(chosen.trainable.index(True), rejected.trainable.index(True)),
                chosen_trainable=chosen.trainable,
                rejected_trainable=rejected.trainable,
                margin=row.margin,
            )
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from error
        pairs.append(pair)
    return pairs


def tokenized_answer(row: PreferenceRow | LabelledRow, answer: Sequence[Message], chat: Chat) -> TokenizedConversation:
    """The row's messages, of which nothing is learnt, and after them `answer`, of which the assistant's part is."""
    context = [{**message, "train": False} for message in row.messages]
    return chat.conversation(row, messages=[*context, *answer])


def pairs_from_rollouts(rollouts: Rollouts, *, pairs_per_prompt: int) -> list[Pair]:
    """Pair the best-rewarded rows of each group with the worst; groups whose rewards are all equal give none.

    Rows that failed say nothing of the policy, and are left out first.
    """
    rows: dict[int, list[int]] = {}
    for row in (~rollouts.failed).nonzero()[:, 0].tolist():
        rows.setdefault(int(rollouts.groups[row]), []).append(row)
    pairs: list[Pair] = []
    for group in rows.values():
        rewards = rollouts.rewards[group].tolist()
        best, worst = max(rewards), min(rewards)
        if best == worst:
            continue
        chosen, rejected = (
            [row for row, reward in zip(group, rewards, strict=True) if reward == value] for value in (best, worst)
        )
        number = min(pairs_per_prompt, max(len(chosen), len(rejected)))
        pairs += [_pair(rollouts, chosen[k % len(chosen)], rejected[k % len(rejected)]) for k in range(number)]
    return pairs


def pad_pairs(pairs: Sequence[Pair]) -> PaddedRows:
    """Pad to one width, chosen and rejected in turn; `answer` is True where the policy spoke.

    Raises:
        ValueError: there are no pairs.
    """
    if not pairs:
        raise ValueError("there are no pairs to learn from; a pair needs two answers to one prompt, one of them better")
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    masks = [mask for pair in pairs for mask in (pair.chosen_trainable, pair.rejected_trainable)]
    starts = [pair.prompt_length for pair in pairs for _ in range(2)]
    marks = [_marks(row, mask, start) for row, mask, start in zip(rows, masks, starts, strict=True)]
    said = pad([[int(mark) for mark in each] for each in marks], answer_starts=starts)
    return replace(pad(rows, answer_starts=starts), answer=said.tokens.bool())


def rows_of_pairs(pairs: Sequence[int]) -> Int[Tensor, " B"]:
    """The rows of some pairs, in their order.

    >>> rows_of_pairs([3, 0])
    tensor([6, 7, 0, 1])
    """
    return torch.tensor([row for pair in pairs for row in (2 * pair, 2 * pair + 1)], dtype=torch.int64)


def require_answers(trainable: Bool[Tensor, "B T"]) -> None:
    """Refuse pairs that one answer is missing from.

    Raises:
        ValueError: there are no pairs, or an answer has no trainable token.
    """
    empty = (~trainable.any(dim=1)).nonzero()[:, 0].tolist()
    if empty or not len(trainable):
        which = (
            f"the {('chosen', 'rejected')[empty[0] % 2]} answer of pair {empty[0] // 2}"
            if empty
            else "there is no pair:"
        )
        raise ValueError(f"{which} has no trainable token; leave such pairs out, there is nothing to compare")


def _marks(tokens: Sequence[int], mask: Sequence[bool] | None, start: int) -> list[bool]:
    return [index >= start and (mask is None or mask[index]) for index in range(len(tokens))]


def _pair(rollouts: Rollouts, chosen: int, rejected: int) -> Pair:
    def cut(tensor: Tensor, row: int) -> tuple[int, ...]:
        return tuple(tensor[row, : rollouts.lengths[row]].tolist())

    return Pair(
        chosen=cut(rollouts.tokens, chosen),
        rejected=cut(rollouts.tokens, rejected),
        prompt_length=int(rollouts.response[chosen].int().argmax()),
        chosen_trainable=tuple(map(bool, cut(rollouts.response, chosen))),
        rejected_trainable=tuple(map(bool, cut(rollouts.response, rejected))),
    )
