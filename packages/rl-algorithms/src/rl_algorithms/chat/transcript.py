"""A conversation on its way to token ids, and which of its messages are to be learnt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from rl_algorithms.choices import check_choice
from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError

__all__ = ["Answered", "Source", "Span", "TrainOn", "Transcript", "content_of", "learnt_messages"]

TrainOn: TypeAlias = Literal["assistant", "last_turn", "all"]
"""What of a conversation is learnt: every assistant message, the last one, or every token whoever said it."""

Span: TypeAlias = tuple[int, int]
"""The tokens from the first number to before the second."""

Answered: TypeAlias = tuple[tuple[int, ...], list[Span]]
"""All tokens of a conversation, and where the answers to be learnt stand, each with the stop token that ends it."""


@runtime_checkable
class Source(Protocol):
    """A data row with messages. `tools`, JSON schemas for the chat template, are taken where it has them."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns."""

    @property
    def where(self) -> str:
        """File and line, for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Messages with all that it takes to render them, and to say where they came from."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...]
    where: str

    @classmethod
    def of(cls, row: Source, messages: Sequence[Message] | None = None) -> "Transcript":
        """The row's messages, or these in their place, without the `train` marks, which no template knows."""
        return cls(
            messages=tuple(
                {key: value for key, value in message.items() if key != "train"}
                for message in (row.messages if messages is None else messages)
            ),
            tools=tuple(getattr(row, "tools", None) or ()),
            where=row.where,
        )

    def then(self, *messages: Message) -> "Transcript":
        """The same with these said after it."""
        return replace(self, messages=(*self.messages, *messages))

    def upto(self, count: int) -> "Transcript":
        """The first `count` messages."""
        return replace(self, messages=self.messages[:count])

    @property
    def roles(self) -> tuple[str, ...]:
        """Who says each message."""
        return tuple(str(message.get("role")) for message in self.messages)

    @property
    def answers(self) -> list[int]:
        """Which messages are the assistant's."""
        return [index for index, message in enumerate(self.messages) if message.get("role") == "assistant"]


def content_of(message: Message, where: str) -> str:
    """The text of a message.

    Raises:
        DataError: it has none, or parts that are no text, or tool calls beside it.
    """
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(
            f"{where}: a message of role {message.get('role')!r} has the content {content!r:.60}, which is no text; "
            f"prompt_format='plain' knows text only, use 'chat' with a template that renders it"
        )
    if message.get("tool_calls"):
        raise DataError(
            f"{where}: a message of role {message.get('role')!r} has tool_calls, and prompt_format='plain' knows text "
            f"only; use 'chat' with a template that renders them, or write the call into its content"
        )
    return content


def learnt_messages(messages: Sequence[Message], *, train_on: TrainOn, where: str) -> tuple[int, ...]:
    """Which messages are learnt: those of `train_on`, unless their own `train` says otherwise.

    Raises:
        ValueError: `train_on` is none of its values.
        DataError: a `train` is no boolean, or asks for a message that is not the assistant's; or nothing is left.
    """
    check_choice("train_on", train_on, TrainOn)
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    learnt = set(answers[-1:] if train_on == "last_turn" else answers)
    for index, message in enumerate(messages):
        mark = message.get("train")
        if mark is not None and not isinstance(mark, bool):
            raise DataError(f"{where}: field 'messages[{index}].train' must be true or false, found {mark!r:.60}")
        if mark and index not in answers:
            raise DataError(
                f"{where}: field 'messages[{index}].train' is true for the role {message.get('role')!r}; only the "
                f"assistant's messages can be learnt one by one (train_on='all' learns every token)"
            )
        if mark is not None:
            (learnt.add if mark else learnt.discard)(index)
    if not learnt:
        raise DataError(
            f"{where}: none of the {len(messages)} messages is to be learnt; a conversation needs a message of role "
            f"'assistant' whose `train` is not false"
        )
    return tuple(sorted(learnt))
