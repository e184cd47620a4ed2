"""One row of raw columns, and the checks of its fields: texts, messages, tools, numbers.

Every refusal names the row, the field by the name that the data gives it, and what was found.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from rl_algorithms.contracts import Message
from rl_algorithms.rows import DataError, Tools

__all__ = [
    "ROLES",
    "RawRow",
    "check_messages",
    "nearest",
    "parse_json",
    "read_answers",
    "read_messages",
    "read_number",
    "read_tools",
]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "environment")
"""Who may speak in a conversation: the roles of today's chat templates."""


def parse_json(text: str) -> object:
    """JSON, and not what Python takes for it.

    Raises:
        ValueError: it is none, has NaN or an infinity, or an object has a name twice.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice in one object, and one of the two would be lost")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON; write null, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """A row before anything is known of it."""

    columns: Mapping[str, object]
    """All columns under their own names; those that were mapped under our names, too."""

    where: str
    """File and line."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Our name -> their column, where they differ."""

    fills_none: bool = False
    """True for Arrow, where all messages have the keys of any of them: None is then what was never there."""

    def get(self, name: str) -> object:
        """A column by our name; None where it is missing."""
        return self.columns.get(name)

    def require(self, name: str) -> object:
        """A column that must be there, even if it is None."""
        if name not in self.columns:
            listed = ", ".join(map(repr, self.columns)) or "no fields"
            raise DataError(f"{self.where}: field {name!r} is missing; the row has {listed}")
        return self.columns[name]

    def error(self, name: str, what: str, *, path: str = "") -> DataError:
        """What to raise for a field; `path` leads to the part of it that is meant."""
        theirs = self.names.get(name, name)
        read_as = "" if theirs == name else f" (read as {name!r})"
        return DataError(f"{self.where}: field '{theirs}{path}'{read_as} {what}")


def nearest(name: str, known: list[str]) -> str:
    """`; 'x' is the nearest`, if any is near."""
    found = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; {found[0]!r} is the nearest" if found else ""


def read_messages(raw: RawRow, name: str) -> tuple[Message, ...]:
    """A prompt: text, which the user then says, or messages. It ends with something to answer.

    Raises:
        DataError: it is missing, is neither, or there is nothing to answer.
    """
    value = raw.require(name)
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return check_prompt(raw, name, messages=check_messages(raw, name, value=value))


def check_prompt(raw: RawRow, name: str, *, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Refuse a prompt that there is nothing to answer in."""
    last = messages[-1]
    if last["role"] == "assistant":
        raise raw.error(name, "ends with the assistant's message; the last message is what the policy answers")
    if not last["content"] and last["role"] != "tool":  # a tool may well return nothing
        raise raw.error(name, "is empty; the last message is what the policy answers")
    return messages


def read_answers(raw: RawRow, name: str) -> tuple[Message, ...]:
    """An answer: text, which the assistant then says, or messages of which the first and the last are its.

    Raises:
        DataError: it is missing, is neither, or someone else begins or ends it.
    """
    value = raw.require(name)
    if isinstance(value, str):
        return ({"role": "assistant", "content": value},)
    return check_answers(raw, name, messages=check_messages(raw, name, value=value))


def check_answers(raw: RawRow, name: str, *, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Refuse an answer that someone else begins or ends."""
    for message, verb in ((messages[0], "begin"), (messages[-1], "end")):
        if message["role"] != "assistant":
            raise raw.error(name, f"must {verb} with an assistant's message, found one of role {message['role']!r}")
    return messages


def check_messages(raw: RawRow, name: str, *, value: object) -> tuple[Message, ...]:
    """Messages, each with a role of `ROLES`, a text (None beside `tool_calls`) and no key that is None.

    Raises:
        DataError: they are none; it names the message and its field.
    """
    if not isinstance(value, list) or not value:
        raise raw.error(name, f"must be text or a list of messages, found {type(value).__name__} {value!r:.60}")
    return tuple(_message(raw, name, index=index, item=item) for index, item in enumerate(value))


def _message(raw: RawRow, name: str, *, index: int, item: object) -> Message:
    path = f"[{index}]"
    if not isinstance(item, Mapping):
        raise raw.error(name, f"must have a text 'role' and 'content', found {item!r:.60}", path=path)
    message: Message = {key: value for key, value in item.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    calls = _tool_calls(raw, name, path=path, message=message)
    if isinstance(content, list):
        content = "".join(
            _part(raw, name, path=f"{path}.content[{place}]", part=part) for place, part in enumerate(content)
        )
    silent = content is None and role == "assistant" and calls
    if not isinstance(role, str) or not role or not (isinstance(content, str) or silent):
        raise raw.error(name, f"must have a text 'role' and 'content', found {item!r:.60}", path=path)
    if role not in ROLES:
        near = nearest(role.strip().casefold(), [*ROLES])
        raise raw.error(name, f"must be one of {', '.join(ROLES)}, found {role!r:.60}{near}", path=f"{path}.role")
    message["content"] = content  # templates tell a call by a content that is None, and not by one that is missing
    _mark_train(raw, name, path=path, message=message)
    return message


def _part(raw: RawRow, name: str, *, path: str, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise raw.error(name, f"is a part of type {kind!r}, and only parts of text are supported", path=path)
    return text


def _tool_calls(raw: RawRow, name: str, *, path: str, message: Message) -> bool:
    calls = message.get("tool_calls")
    if calls is None:
        return False
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise raw.error(name, f"must be a list of objects, found {calls!r:.60}", path=f"{path}.tool_calls")
    message["tool_calls"] = _without_none(calls) if raw.fills_none else calls
    return bool(calls)


def _mark_train(raw: RawRow, name: str, *, path: str, message: Message) -> None:
    if "weight" in message:  # what fine-tuning files of OpenAI's format call it
        weight = message.pop("weight")
        if weight not in (0, 1):
            raise raw.error(name, f"must be 0 or 1, found {weight!r:.60}", path=f"{path}.weight")
        message.setdefault("train", bool(weight))
    if not isinstance(message.get("train", True), bool):
        raise raw.error(name, f"must be true or false, found {message['train']!r:.60}", path=f"{path}.train")


def read_tools(raw: RawRow) -> Tools:
    """Schemas of tools: a list of objects, or of their JSON, or the JSON of such a list. None is none.

    Raises:
        DataError: it is something else, or JSON that is none.
    """
    value = raw.get("tools")
    tools = _parsed(raw, value, path="") if isinstance(value, str) else value
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise raw.error("tools", f"must be a list of JSON schemas, found {type(value).__name__} {value!r:.60}")
    return tuple(_tool(raw, index=index, item=item) for index, item in enumerate(tools))


def _tool(raw: RawRow, *, index: int, item: object) -> Mapping[str, object]:
    path = f"[{index}]"
    tool = _parsed(raw, item, path=path) if isinstance(item, str) else item
    if not isinstance(tool, Mapping):
        raise raw.error("tools", f"must be a JSON schema, found {item!r:.60}", path=path)
    return {key: _without_none(value) for key, value in tool.items()} if raw.fills_none else tool


def _parsed(raw: RawRow, text: str, *, path: str) -> object:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise raw.error("tools", f"is no JSON ({error}): {text[:60]!r}", path=path) from error


def read_number(raw: RawRow, name: str, *, default: float) -> float:
    """A finite number; `default` where it is missing.

    Raises:
        DataError: it is none.
    """
    value = raw.get(name)
    if value is None:
        return default
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise raw.error(name, f"must be a finite number, found {type(value).__name__} {value!r:.60}")
    return number


def _without_none(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_none(part) for part in value]
    return value
