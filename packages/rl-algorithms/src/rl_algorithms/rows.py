"""The kinds of row: a prompt, a conversation, a preference, a labelled answer. All frozen.

Whatever the kind, a row knows its `messages`, the `tools` they may call, `columns` (all that the data says, for reward
functions) and `where` it stands (for error messages).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rl_algorithms.contracts import Message

__all__ = ["ConversationRow", "DataError", "LabelledRow", "PreferenceRow", "Question", "Row", "Tools", "unpaired"]

Question: TypeAlias = tuple[tuple[str, str], ...]
"""Roles and texts of a prompt: what makes two rows the same prompt."""

Tools: TypeAlias = tuple[Mapping[str, object], ...]
"""JSON schemas of the tools that an answer may call, for the chat template."""


class DataError(ValueError):
    """Data that cannot be used; the message names file, line and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt."""

    messages: tuple[Message, ...]
    """The prompt as chat messages; the last one is what the policy answers."""

    columns: Mapping[str, object]
    """Every column of the row, `prompt` and `answer` included, untouched."""

    where: str
    """File and line; or file and index, from 0, as in `train.parquet[17]`; or the name of a generator and an index."""

    tools: Tools = ()
    """Tools that the policy may call."""

    @property
    def prompt(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1]["content"])

    @property
    def question(self) -> Question:
        """All messages: what makes two rows the same prompt."""
        return question_of(self.messages)

    @property
    def answer(self) -> str | None:
        """The right answer as text to imitate, where the data has one that is text or a number.

        Reward functions are given the column as it is, whatever it holds.
        """
        return answer_text(self.columns.get("answer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation to imitate. An assistant's message with `"train": False` is context only."""

    messages: tuple[Message, ...]
    """All turns, at least one of them the assistant's and not `"train": False`."""

    columns: Mapping[str, object]
    """Every column of the row, untouched."""

    where: str
    """As in `Row`."""

    tools: Tools = ()
    """Tools that the assistant could call."""

    weight: float = 1.0
    """What the row counts in the loss; finite, not negative."""

    @property
    def question(self) -> Question:
        """What stands before the first answer that is trained on; the whole, where nothing does."""
        return question_of(self.messages[: self._answers()[0]] or self.messages)

    @property
    def questions(self) -> tuple[Question, ...]:
        """What stands before each answer that is trained on."""
        return tuple(question_of(self.messages[:index]) for index in self._answers())

    def _answers(self) -> list[int]:
        return [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and message.get("train", True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRow:
    """Two answers to one prompt, one of them better."""

    messages: tuple[Message, ...]
    """The prompt."""

    chosen: tuple[Message, ...]
    """The better answer: an assistant's message, or several with what tools returned between them."""

    rejected: tuple[Message, ...]
    """The worse one."""

    columns: Mapping[str, object]
    """Every column of the row, untouched."""

    where: str
    """As in `Row`."""

    tools: Tools = ()
    """Tools that the assistant could call."""

    margin: float = 0.0
    """By how much the better one is better, for losses that ask."""

    @property
    def question(self) -> Question:
        """The prompt: what makes two rows the same prompt."""
        return question_of(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """One answer to a prompt, good or bad: what KTO learns from. The words `completion` and `label` are TRL's."""

    messages: tuple[Message, ...]
    """The prompt."""

    completion: tuple[Message, ...]
    """The answer, as in `PreferenceRow.chosen`."""

    label: bool
    """Whether it is good."""

    columns: Mapping[str, object]
    """Every column of the row, untouched."""

    where: str
    """As in `Row`."""

    tools: Tools = ()
    """Tools that the assistant could call."""

    @property
    def question(self) -> Question:
        """The prompt: what makes two rows the same prompt."""
        return question_of(self.messages)


def answer_text(value: object) -> str | None:
    """Text and numbers as text; None of anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)


def unpaired(row: PreferenceRow) -> tuple[LabelledRow, LabelledRow]:
    """The better answer of a pair as a good one, the worse as a bad one: preferences for KTO."""

    def labelled(completion: tuple[Message, ...], *, label: bool) -> LabelledRow:
        return LabelledRow(
            messages=row.messages,
            completion=completion,
            label=label,
            columns=row.columns,
            where=row.where,
            tools=row.tools,
        )

    return labelled(row.chosen, label=True), labelled(row.rejected, label=False)


def question_of(messages: tuple[Message, ...]) -> Question:
    """Roles and texts. A message that is more than a text, such as a call of a tool, is its JSON."""
    return tuple((message["role"], _said(message)) for message in messages)


def _said(message: Message) -> str:
    rest = {key: value for key, value in message.items() if key not in {"role", "train"}}
    content = rest.get("content")
    if set(rest) == {"content"} and isinstance(content, str):
        return content
    return json.dumps(rest, sort_keys=True, default=str)
