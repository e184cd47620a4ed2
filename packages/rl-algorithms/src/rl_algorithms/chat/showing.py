"""Whether a chat template shows what messages say: found out with words that stand nowhere else.

A template leaves things out by their kind (a role that it does not know, tool calls), never by their words. So each
shape of conversation is tried once.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from rl_algorithms.chat.transcript import Transcript
from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError

__all__ = ["Shown", "unused"]


class Shown:
    """Refuses what a template leaves out. `render(transcript, asks)` gives its text, or raises DataError."""

    def __init__(self, render: Callable[[Transcript, bool], str]) -> None:
        self._render = render
        self._seen: set[object] = set()

    def check(self, transcript: Transcript, indices: Iterable[int], *, asks: bool, first: int = 0) -> None:
        """Refuse a template that leaves out the text of `indices`, any tool call, or shows a missing text as "None".

        Args:
            transcript: the conversation.
            indices: the messages whose text must be shown.
            asks: whether it is rendered with what asks for an answer.
            first: the messages from here on are called observations, counted from 0.

        Raises:
            DataError: it names the message.
        """
        messages = transcript.messages
        texts = tuple(index for index in indices if _has_text(messages[index]))
        silent = tuple(index for index, message in enumerate(messages) if message.get("content", "") is None)
        shape = (transcript.roles, texts, silent, tuple(map(_shape_of_calls, messages)), bool(transcript.tools))
        if shape in self._seen:
            return
        word = unused("message", messages)
        marks = {f"{word}x{index}x": (index, "") for index in texts}
        said = {index: {**messages[index], "content": mark} for mark, (index, _) in marks.items()}
        self._try(transcript, said, marks, asks=asks, first=first)
        called, marks = _with_marked_calls(messages, word)
        self._try(transcript, called, marks, asks=asks, first=first)
        if silent:
            self._check_silence(transcript, silent, asks=asks, first=first)
        self._seen.add(shape)

    def _try(
        self,
        transcript: Transcript,
        changed: Mapping[int, Message],
        marks: Mapping[str, tuple[int, str]],
        *,
        asks: bool,
        first: int,
    ) -> None:
        """Render with some messages changed, and look for the marks in them, each of a part of a message."""
        if not marks:
            return
        try:
            text = self._render(_changed(transcript, changed), asks)
        except DataError:  # a template that wants to read more than a word in a message; what was said, it rendered
            return
        for mark, (index, part) in marks.items():
            if mark not in text:
                remedy = (
                    "use a template that renders tool calls, or write the call into the message's content as the "
                    "policy is to say it"
                    if part
                    else "give it a role that the template renders, or use a template that renders it"
                )
                raise DataError(
                    f"{transcript.where}: the chat template leaves out {_name(index, first)}{part}, of role "
                    f"{transcript.roles[index]!r}; {remedy}"
                )

    def _check_silence(self, transcript: Transcript, silent: Sequence[int], *, asks: bool, first: int) -> None:
        for index in silent:
            emptied = _changed(transcript, {index: {**transcript.messages[index], "content": ""}})
            try:
                without = self._render(emptied, asks)
            except DataError:  # it tells a call by a content that is None
                continue
            if self._render(transcript, asks).count("None") > without.count("None"):
                raise DataError(
                    f"{transcript.where}: the chat template writes the word None for {_name(index, first)}, of role "
                    f"{transcript.roles[index]!r}, whose content is missing; use a template that knows messages "
                    f"without text, or give it the content ''"
                )


def unused(word: str, messages: Sequence[Message]) -> str:
    """`word` with a number, such that it occurs in none of the messages."""
    said = repr(messages)
    return next(each for each in (f"{word}{number}" for number in range(len(said) + 1)) if each not in said)


def _name(index: int, first: int) -> str:
    return f"messages[{index}]" if index < first or not first else f"observations[{index - first}]"


def _changed(transcript: Transcript, changed: Mapping[int, Message]) -> Transcript:
    messages = tuple(changed.get(index, message) for index, message in enumerate(transcript.messages))
    return replace(transcript, messages=messages)


def _has_text(message: Message) -> bool:
    """Whether it has a text that must be shown; an empty one beside tool calls need not be."""
    content = message.get("content")
    return isinstance(content, str) and bool(content or not message.get("tool_calls"))


def _shape_of_calls(message: Message) -> tuple[tuple[str, bool], ...]:
    functions = [_function(call) for call in message.get("tool_calls") or ()]
    return tuple((type(function.get("arguments")).__name__, bool(function.get("arguments"))) for function in functions)


def _function(call: Mapping[str, object]) -> Mapping[str, object]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _with_marked_calls(messages: Sequence[Message], word: str) -> tuple[dict[int, Message], dict[str, tuple[int, str]]]:
    """The messages with tool calls, with marks for the names and arguments, and what the marks stand for."""
    changed: dict[int, Message] = {}
    marks: dict[str, tuple[int, str]] = {}
    for index, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            name, said = f"{word}n{index}n{number}n", f"{word}a{index}a{number}a"
            arguments = _function(call).get("arguments")
            marks[name] = (index, f".tool_calls[{number}].name")
            marked: dict[str, object] = {"name": name}
            if arguments and isinstance(arguments, Mapping | str):
                marks[said] = (index, f".tool_calls[{number}].arguments")
                marked["arguments"] = {said: said} if isinstance(arguments, Mapping) else json.dumps({said: said})
            function = {**_function(call), **marked}
            calls.append({**call, "function": function} if "function" in call else function)
        if calls:
            changed[index] = {**message, "tool_calls": calls}
    return changed, marks
