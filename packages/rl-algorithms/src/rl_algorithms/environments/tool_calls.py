"""Tool calls: found in an answer's text.

Two forms are read. Hermes's, which Qwen's models write too, any number of times in an answer:

    <tool_call>
    {"name": "search", "arguments": {"query": "Elo"}}
    </tool_call>

and a fenced block of JSON with the same two keys, marked ```json or ```tool_call. What stands before the last
`</think>` is thought, not said, and no call. Reading takes time linear in the answer's length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rl_algorithms.choices import check_choice
from rl_algorithms.data.fields import parse_json

__all__ = ["CallFormat", "MalformedCall", "ToolCall", "parse_tool_calls"]

CallFormat: TypeAlias = Literal["hermes", "fenced"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE, FENCED_AS = "```", ("json", "tool_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that can be read. Whether there is such a tool is another question."""

    name: str
    """The tool's name."""

    arguments: dict[str, Any]
    """Its arguments by name, as JSON gives them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """What was meant as a call and cannot be read: the policy's mistake."""

    text: str
    """What stands there, at most 200 characters of it."""

    reason: str
    """What is wrong with it, for the policy to read."""


def parse_tool_calls(answer: str, *, call_format: CallFormat = "hermes") -> tuple[ToolCall | MalformedCall, ...]:
    """The calls in an answer, in order; empty for an answer that calls nothing. No text makes it raise.

    Args:
        answer: the policy's text.
        call_format: `"hermes"` or `"fenced"`. A fenced block that is not an object with `name` and `arguments` is part
            of the answer, for answers may well show JSON; whatever stands in Hermes's tags is meant as a call.

    Raises:
        ValueError: there is no such format.
    """
    check_choice("call_format", call_format, CallFormat)
    said = answer.rpartition("</think>")[2]
    return tuple(_hermes(said) if call_format == "hermes" else _fenced(said))


def _hermes(text: str) -> Iterator[ToolCall | MalformedCall]:
    position = text.find(OPEN)
    while position >= 0:
        start = position + len(OPEN)
        end = text.find(CLOSE, start)
        if end < 0:
            yield MalformedCall(text=text[start : start + 200], reason=f"{OPEN} is never closed by {CLOSE}")
            return
        yield _read(text[start:end])
        position = text.find(OPEN, end)


def _fenced(text: str) -> Iterator[ToolCall | MalformedCall]:
    position = text.find(FENCE)
    while position >= 0:
        line_end = text.find("\n", position)
        end = text.find(FENCE, line_end) if line_end >= 0 else -1
        if end < 0:
            return
        if text[position + len(FENCE) : line_end].strip() in FENCED_AS:
            call = _read(text[line_end:end])
            if isinstance(call, ToolCall):
                yield call
        position = text.find(FENCE, end + len(FENCE))


def _read(text: str) -> ToolCall | MalformedCall:
    shown = text.strip()[:200]
    try:
        call = parse_json(text)
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):  # OpenAI's form: JSON within JSON
            call["arguments"] = parse_json(call["arguments"])
    except (ValueError, RecursionError) as error:
        return MalformedCall(text=shown, reason=f"it is not valid JSON: {error}")
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return MalformedCall(text=shown, reason='it must be {"name": ..., "arguments": {...}} and nothing else')
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        return MalformedCall(text=shown, reason='"name" must be a string and "arguments" an object')
    return ToolCall(name=call["name"], arguments=call["arguments"])
