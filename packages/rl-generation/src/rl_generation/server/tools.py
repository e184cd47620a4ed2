"""Tool calls in the text of a response: which format a model writes them in, and the calls in OpenAI's form.

    Hermes, Qwen   text <tool_call>{"name": …, "arguments": {…}}</tool_call> …
    Llama 3        <|python_tag|>{"name": …, "parameters": {…}}; …             the tag may be missing: all is JSON then
    Mistral        text [TOOL_CALLS][{"name": …, "arguments": {…}}, …]         or [TOOL_CALLS]name[ARGS]{…} …

Where `tool_choice` forces a call, the response is one JSON value of a schema instead, as in vLLM: the arguments of the
named function, or a list of calls. Text that is no valid call stays text.
Reference: vLLM's tool parsers (github.com/vllm-project/vllm, vllm/entrypoints/openai/tool_parsers).
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rl_generation.detokenizer import Tokenizer
from rl_generation.errors import EngineOptionError
from rl_generation.server.guard import HttpError

ToolFormat = Literal["hermes", "llama", "mistral"]
TOOL_FORMATS: Mapping[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
"""Formats by name, each with what opens a call."""

HERMES_CALLS = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
BEFORE_CALL = re.compile(r"\A(?:\s|;|<\|python_tag\|>|\[TOOL_CALLS\])+")
MISTRAL_NAME = re.compile(r"([\w.\-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def tool_format_of(tokenizer: Tokenizer, name: str | None = None) -> ToolFormat | None:
    """Return the format of this name, or that which a model's chat template or vocabulary names, or None.

    Raises:
        EngineOptionError: The embedded engine's server knows no format of this name.
    """
    if name is not None and name not in TOOL_FORMATS:
        raise EngineOptionError(
            f"tool_format={name!r} is not known: calls are parsed in the formats {', '.join(TOOL_FORMATS)}; over "
            f"vLLM's engine, any parser of vLLM's does"
        )
    if name is not None:
        return cast("ToolFormat", name)
    template = tokenizer.chat_template
    written = " ".join(template.values()) if isinstance(template, dict) else str(template or "")
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    named: list[ToolFormat] = [each for each, opening in TOOL_FORMATS.items() if opening in written]
    if '"parameters": dictionary of argument name' in written:  # Llama 3.2, whose template has no tag
        named.append("llama")
    return next(iter([*named, *(each for each, opening in TOOL_FORMATS.items() if opening in added)]), None)


ToolCall = dict[str, Any]
"""One call of a function, in OpenAI's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How the calls of one request are found in its responses."""

    format: ToolFormat | None
    """None where the response is forced to be one JSON value, of `schema`."""

    schema: dict[str, Any] | None = None

    forced_name: str | None = None
    """The function whose arguments the response is; None beside `format=None` means a list of calls."""

    parallel: bool = True
    """False keeps the first call alone."""


def read_tools(
    tools: Sequence[Mapping[str, Any]], choice: Any, *, parallel: bool, found: ToolFormat | None
) -> ToolUse | None:
    """Return how calls are found in a response; None where there are none.

    Takes OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, and the model's format, None where it is not known.

    Raises:
        HttpError: 400; a tool is no function, the choice names none of them, or the model's format is not known.
    """
    functions: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            message = f"tools[{index}] must be of type 'function', with a function that has a name"
            raise HttpError(400, message, param=f"tools[{index}]", code="invalid_type")
        functions[function["name"]] = function
    named = None
    match choice:
        case None | "none" | "auto" | "required":
            pass
        case {"type": "function", "function": {"name": str(name)}} if name in functions:
            named = name
        case _:
            message = (
                f"tool_choice must be 'none', 'auto', 'required', or name one of the functions "
                f"{sorted(functions)}; got {json.dumps(choice)[:100]}"
            )
            raise HttpError(400, message, param="tool_choice", code="invalid_value")
    if choice == "required" and not functions:
        raise HttpError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    if choice == "none" or not functions:
        return None
    schemas = {name: function.get("parameters") or {"type": "object"} for name, function in functions.items()}
    if named is not None:
        return ToolUse(format=None, schema=schemas[named], forced_name=named, parallel=parallel)
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for name, schema in schemas.items()
        ]
        several = {"type": "array", "minItems": 1, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        most = {} if parallel else {"maxItems": 1}
        return ToolUse(format=None, schema=several | most, parallel=parallel)
    if found is None:
        message = (
            "the model's chat template names no known format of tool calls, so that they could not be parsed: start "
            f"the server with a tool_format, {', '.join(TOOL_FORMATS)}, or send tool_choice='none' or 'required'"
        )
        raise HttpError(400, message, param="tools", code="unsupported_field")
    return ToolUse(format=found, parallel=parallel)


class ReplyStream:
    """Divides the text of one response while it grows: what is said is passed on, calls are held until the end."""

    def __init__(self, use: ToolUse | None) -> None:
        self._use = use
        self._held = ""
        self._in_calls = use is not None and use.format is None

    def push(self, text: str) -> str:
        """Take the next piece of text; return what is certainly said."""
        if self._use is None:
            return text
        self._held += text
        if self._in_calls or self._use.format is None:
            return ""
        opening = TOOL_FORMATS[self._use.format]
        if self._use.format == "llama" and self._held.lstrip()[:1] in ("{", ""):
            # A call without its tag is JSON from the first character on.
            start, self._in_calls = 0, bool(self._held.strip())
        else:
            start = len(self._held) - overlap(self._held, opening)
            self._in_calls = self._held.startswith(opening, start)
        said, self._held = self._held[:start], self._held[start:]
        return said

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest: what is said that was held back, and the calls."""
        if self._use is None or not self._in_calls:
            return self._held, []
        content, calls = _parse(self._held, self._use)
        return content, calls if self._use.parallel else calls[:1]


def _parse(text: str, use: ToolUse) -> tuple[str, list[ToolCall]]:
    """Return what of `text`, which begins with a call, is said, and its calls."""
    content, rest = "", text
    if use.format == "hermes":
        content, rest = HERMES_CALLS.sub("", text), ";".join(HERMES_CALLS.findall(text))
    calls: list[ToolCall] = []
    try:
        if use.forced_name is not None:
            json.loads(text)
            return "", [_written(use.forced_name, text)]
        # JSON values one after another, each of them a call or a list of calls, or, with Mistral, behind a name.
        while rest := BEFORE_CALL.sub("", rest):
            named = MISTRAL_NAME.match(rest) if use.format == "mistral" else None
            value, end = json.JSONDecoder().raw_decode(rest, named.end() if named else 0)
            values = [{"name": named[1], "arguments": value}] if named else value
            calls += map(_call, values if isinstance(values, list) else [values])
            rest = rest[end:]
    except (ValueError, KeyError, TypeError):
        return text, []
    if not calls:
        return text, []
    return content if content.strip() else "", calls


def _call(value: Any) -> ToolCall:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(value["name"], str) or not isinstance(arguments, dict):
        raise TypeError("a call has a name and an object of arguments")
    return _written(value["name"], json.dumps(arguments, ensure_ascii=False))


def _written(name: str, arguments: str) -> ToolCall:
    """A call; its arguments are JSON text, as the model wrote it where that can be told."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def overlap(text: str, marker: str) -> int:
    """Characters from the first place in `text` at which `marker` begins, or may begin once more text follows."""
    found = text.find(marker)
    if found >= 0:
        return len(text) - found
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
