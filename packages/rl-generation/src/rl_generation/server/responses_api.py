"""OpenAI's Responses API as a translation: its request is one of a chat, and a chat's response is written as its own.

Nothing is stored, so that a conversation is always sent whole: `previous_response_id` and `conversation` are refused.
Reference: platform.openai.com/docs/api-reference/responses.
"""

import itertools
import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, final

from rl_generation.server.fields import IRRELEVANT, Fields, shortened
from rl_generation.server.guard import HttpError

__all__ = ["ResponsesRequest"]

INCLUDED_LOGP = "message.output_text.logprobs"
"""What `include` may ask for."""

TOKEN_IDS = ("prompt_token_ids", "token_ids")

OF_CHATS: Mapping[str, str] = {
    "function_call": "tool_choice",
    "functions": "tools",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "n": "several requests",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""Fields that chats alone have, with what stands for them here; taken over, they would contradict it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """What a client asked for, and the chat that it means."""

    chat: Fields
    """The body of the chat."""

    echoed: Mapping[str, Any]
    """Fields that the response repeats."""

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")

    @classmethod
    def of(cls, given: Fields) -> "ResponsesRequest":
        """Translate the body of `/v1/responses`.

        Raises:
            HttpError: 400; a field is wrong or needs what a server without a store does not have.
        """
        body = given.everything()
        take = body.pop
        take("model", None)  # checked for every route alike
        for name, instead in OF_CHATS.items():
            if name in body:
                message = f"{name} is a field of /v1/chat/completions; here send {instead}"
                raise HttpError(400, message, param=name, code="unknown_field")
        for name in ("previous_response_id", "conversation", "prompt"):
            if take(name, None) is not None:
                rule = "needs a server that stores responses: send the conversation whole, as input"
                raise _unsupported(name, f"{name} {rule}")
        for name, neutral in (("background", False), ("truncation", "disabled"), ("max_tool_calls", None)):
            if (value := take(name, None)) not in (None, neutral):
                rule = f"is not supported; leave it out, or send {json.dumps(neutral)}"
                raise _unsupported(name, f"{name}={shortened(value)} {rule}")
        instructions, tools, choice = take("instructions", None), take("tools", None), take("tool_choice", None)
        messages = [{"role": "system", "content": instructions}] if instructions is not None else []
        chat: dict[str, Any] = {"messages": messages + _messages(take("input", None))}
        include = take("include", None) or []
        if not isinstance(include, list) or any(each != INCLUDED_LOGP for each in include):
            raise _unsupported("include", f"include takes {INCLUDED_LOGP!r} alone; got {shortened(include)}")
        chat["logprobs"] = bool(include)
        if "max_output_tokens" in body:
            chat["max_completion_tokens"] = take("max_output_tokens")
        text = take("text", None)
        if text is not None:
            chat["response_format"] = _response_format(text)
        reasoning = take("reasoning", None)
        if isinstance(reasoning, dict) and any(value is not None for value in reasoning.values()):
            others = [name for name, value in reasoning.items() if name != "effort" and value is not None]
            if others:
                rule = "is not supported: the reasoning is part of the text"
                raise _unsupported("reasoning", f"reasoning.{others[0][:80]} {rule}")
            chat["reasoning_effort"] = reasoning["effort"]
        if tools:
            chat["tools"] = [
                {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
                if isinstance(tool, dict) and tool.get("type") == "function"
                else tool
                for tool in (tools if isinstance(tools, list) else [tools])
            ]
        if isinstance(choice, dict) and choice.get("type") == "function":
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif choice is not None and (tools or choice != "auto"):
            chat["tool_choice"] = choice
        echoed = {
            "instructions": instructions,
            "max_output_tokens": chat.get("max_completion_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "temperature": body.get("temperature", 1.0),
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": tools or [],
            "top_p": body.get("top_p", 1.0),
        }
        chat |= {name: value for name, value in body.items() if name not in IRRELEVANT}
        return cls(chat=Fields(json.dumps(chat).encode()), echoed=echoed)

    def body(self, answered: Mapping[str, Any]) -> dict[str, Any]:
        """The response that is not streamed, from that of the chat."""
        (choice,) = answered["choices"]
        content = (choice["logprobs"] or {}).get("content") or []
        output = _output(choice["message"]["content"], choice["message"].get("tool_calls", ()), content)
        finish, usage = choice["finish_reason"], answered["usage"]
        ids = {name: said[name] for said in (answered, choice) for name in TOKEN_IDS if name in said}
        return self._response(answered, output=output, finish=finish, usage=usage) | _ours(answered, choice) | ids

    async def events(self, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream, from the chunks of the chat's; closing it closes `chunks`."""
        numbers, message_id = itertools.count(), f"msg_{uuid.uuid4().hex}"
        text, opened = "", False
        calls: list[dict[str, Any]] = []
        logp: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        ended: dict[str, Any] = {}
        place = {"item_id": message_id, "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

        async with aclosing(chunks):
            async for chunk in chunks:
                if not last:
                    begun = self._response(chunk, output=[], finish=None, usage=None)
                    yield event("created", response=begun)
                    yield event("in_progress", response=begun)
                last |= {name: value for name, value in chunk.items() if value is not None}
                for choice in chunk["choices"]:
                    said, news = choice["delta"]["content"], (choice["logprobs"] or {}).get("content") or []
                    calls += choice["delta"].get("tool_calls", ())
                    logp += news
                    if choice["finish_reason"] is not None:
                        ended = choice
                    if said or news:
                        if not opened:
                            opened = True
                            item = _message_item(message_id, [], status="in_progress")
                            yield event("output_item.added", output_index=0, item=item)
                            yield event("content_part.added", **place, part=_part("", []))
                        text += said
                        yield event("output_text.delta", **place, delta=said, logprobs=news)
        output = _output(text, calls, logp, message_id=message_id)
        for index, item in enumerate(output):
            if item["type"] == "message" and opened:
                yield event("output_text.done", **place, text=text, logprobs=logp)
                yield event("content_part.done", **place, part=item["content"][0])
            else:
                begun = {**item, "status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {})
                yield event("output_item.added", output_index=index, item=begun)
            if item["type"] == "function_call":
                named = {"item_id": item["id"], "output_index": index}
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield event("function_call_arguments.delta", **named, delta=item["arguments"])
                yield event("function_call_arguments.done", **named, **done)
            yield event("output_item.done", output_index=index, item=item)
        finish = ended["finish_reason"]
        whole = self._response(last, output=output, finish=finish, usage=last["usage"]) | _ours(last, ended)
        yield event("incomplete" if finish == "length" else "completed", response=whole)

    def _response(
        self, answered: Mapping[str, Any], *, output: list[dict[str, Any]], finish: str | None, usage: Any
    ) -> dict[str, Any]:
        status = {None: "in_progress", "length": "incomplete", "abort": "cancelled"}.get(finish, "completed")
        return {
            "id": self.id,
            "object": "response",
            "created_at": answered["created"],
            "model": answered["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None
            if usage is None
            else {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            **self.echoed,
        }


def _unsupported(param: str, message: str) -> HttpError:
    return HttpError(400, message, param=param, code="unsupported_field")


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages of a chat that the items of `input` are."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        message = f"input must be a string or a list of items; got {shortened(given)}"
        raise HttpError(400, message, param="input", code="missing_field" if given is None else "invalid_type")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            made = {"id": item.get("call_id"), "type": "function", "function": call}
            messages[-1].setdefault("tool_calls", []).append(made)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            rule = "it must be a message, a call or its output"
            raise _unsupported(f"input[{index}].type", f"input[{index}] is of type {shortened(kind)}; {rule}")
    return messages


def _response_format(text: Any) -> dict[str, Any]:
    if not isinstance(text, dict) or text.get("verbosity") not in (None, "medium"):
        raise _unsupported("text", f"text takes a format, and no verbosity; got {shortened(text)}")
    how = text.get("format") or {"type": "text"}
    if not isinstance(how, dict):
        raise HttpError(400, f"text.format must be an object; got {shortened(how)}", param="text", code="invalid_type")
    if how.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in how.items() if key != "type"}}
    return how


def _ours(answered: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """What this package adds to OpenAI's fields."""
    ours = {name: choice[name] for name in ("weight_versions", "stop_reason")}
    return ours | {name: answered[name] for name in ("weight_version", "logp_of")}


def _output(text: str | None, calls: Any, logp: list[Any], *, message_id: str | None = None) -> list[dict[str, Any]]:
    """The items of a response: what is said, where anything is or nothing is called, then the calls."""
    items = []
    if text or not calls:
        items.append(_message_item(message_id or f"msg_{uuid.uuid4().hex}", [_part(text or "", logp)]))
    for call in calls:
        ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
        items.append({"type": "function_call", **ids, **call["function"], "status": "completed"})
    return items


def _message_item(item_id: str, content: list[dict[str, Any]], *, status: str = "completed") -> dict[str, Any]:
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _part(text: str, logp: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logp}
