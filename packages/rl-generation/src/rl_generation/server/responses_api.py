"""OpenAI's Responses API as a translation: its request is one of a chat, and a chat's response is written as its own.

Nothing is stored, so that a conversation is always sent whole: `previous_response_id` and `conversation` are refused.
Reference: platform.openai.com/docs/api-reference/responses.
"""

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
                message = f"{name} needs a server that stores responses: send the conversation whole, as input"
                raise HttpError(400, message, param=name, code="unsupported_field")
        for name, neutral in (("background", False), ("truncation", "disabled"), ("max_tool_calls", None)):
            value = take(name, None)
            if value not in (None, neutral):
                message = f"{name}={shortened(value)} is not supported; leave it out, or send {json.dumps(neutral)}"
                raise HttpError(400, message, param=name, code="unsupported_field")
        instructions, tools, choice = take("instructions", None), take("tools", None), take("tool_choice", None)
        messages = [{"role": "system", "content": instructions}] if instructions is not None else []
        chat: dict[str, Any] = {"messages": messages + _messages(take("input", None))}
        include = take("include", None) or []
        if not isinstance(include, list) or any(each != INCLUDED_LOGP for each in include):
            message = f"include takes {INCLUDED_LOGP!r} alone; got {shortened(include)}"
            raise HttpError(400, message, param="include", code="unsupported_field")
        chat["logprobs"] = bool(include)
        if "max_output_tokens" in body:
            chat["max_completion_tokens"] = body["max_output_tokens"]
            del body["max_output_tokens"]
        text = take("text", None)
        if text is not None:
            chat["response_format"] = _response_format(text)
        reasoning = take("reasoning", None)
        if isinstance(reasoning, dict) and any(value is not None for value in reasoning.values()):
            others = [name for name, value in reasoning.items() if name != "effort" and value is not None]
            if others:
                message = f"reasoning.{others[0][:80]} is not supported: the reasoning is part of the text"
                raise HttpError(400, message, param="reasoning", code="unsupported_field")
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
        ours = {name: choice[name] for name in ("token_ids", "weight_versions", "stop_reason") if name in choice}
        ours |= {name: answered[name] for name in ("prompt_token_ids", "weight_version", "logp_of") if name in answered}
        return self._response(answered, output=output, finish=choice["finish_reason"], usage=answered["usage"]) | ours

    async def events(self, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream, from the chunks of the chat's; closing it closes `chunks`."""
        number = 0
        text = ""
        calls: list[dict[str, Any]] = []
        content: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        usage: dict[str, int] | None = None
        message_id = f"msg_{uuid.uuid4().hex}"
        place = {"item_id": message_id, "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **fields}

        opened = False
        async with aclosing(chunks):
            async for chunk in chunks:
                if not last:
                    begun = self._response(chunk, output=[], finish=None, usage=None)
                    yield event("response.created", response=begun)
                    yield event("response.in_progress", response=begun)
                last = {**last, **chunk}
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    calls += delta.get("tool_calls", ())
                    news = (choice["logprobs"] or {}).get("content") or []
                    content += news
                    if choice["finish_reason"] is not None:
                        last["finish"] = choice
                    if delta["content"] or news:
                        if not opened:
                            opened = True
                            item = _message_item(message_id, None, status="in_progress")
                            yield event("response.output_item.added", output_index=0, item=item)
                            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                            yield event("response.content_part.added", **place, part=part)
                        text += delta["content"]
                        kind = "response.output_text.delta"
                        yield event(kind, **place, delta=delta["content"], logprobs=news)
        ended = last.pop("finish")
        output = _output(text, calls, content, message_id=message_id)
        for index, item in enumerate(output):
            if item["type"] == "message" and opened:
                (part,) = item["content"]
                yield event("response.output_text.done", **place, text=text, logprobs=content)
                yield event("response.content_part.done", **place, part=part)
            else:
                begun = {**item, "status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {})
                yield event("response.output_item.added", output_index=index, item=begun)
            if item["type"] == "function_call":
                named = {"item_id": item["id"], "output_index": index}
                yield event("response.function_call_arguments.delta", **named, delta=item["arguments"])
                done = {"name": item["name"], "arguments": item["arguments"]}
                yield event("response.function_call_arguments.done", **named, **done)
            yield event("response.output_item.done", output_index=index, item=item)
        finish = ended["finish_reason"]
        whole = self._response(last, output=output, finish=finish, usage=usage)
        whole |= {name: ended[name] for name in ("weight_versions", "stop_reason") if name in ended}
        whole |= {name: last[name] for name in ("weight_version", "logp_of") if name in last}
        yield event("response.incomplete" if finish == "length" else "response.completed", response=whole)

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
            message = f"input[{index}] is of type {shortened(kind)}; it must be a message, a call or its output"
            raise HttpError(400, message, param=f"input[{index}].type", code="unsupported_field")
    return messages


def _response_format(text: Any) -> dict[str, Any]:
    if not isinstance(text, dict) or text.get("verbosity") not in (None, "medium"):
        message = f"text takes a format, and no verbosity; got {shortened(text)}"
        raise HttpError(400, message, param="text", code="unsupported_field")
    how = text.get("format") or {"type": "text"}
    if not isinstance(how, dict):
        raise HttpError(400, f"text.format must be an object; got {shortened(how)}", param="text", code="invalid_type")
    if how.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {key: value for key, value in how.items() if key != "type"}}
    return how


def _output(text: str | None, calls: Any, logp: list[Any], *, message_id: str | None = None) -> list[dict[str, Any]]:
    """The items of a response: what is said, where anything is or nothing is called, then the calls."""
    items = []
    if text or not calls:
        part = {"type": "output_text", "text": text or "", "annotations": [], "logprobs": logp}
        items.append(_message_item(message_id or f"msg_{uuid.uuid4().hex}", part, status="completed"))
    return items + [
        {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call["id"],
            **call["function"],
            "status": "completed",
        }
        for call in calls
    ]


def _message_item(item_id: str, part: dict[str, Any] | None, *, status: str) -> dict[str, Any]:
    content = [] if part is None else [part]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}
