"""OpenAI's Responses API as a translation: its request is one of a chat, and a chat's response is written as its own.

Nothing is stored, so that a conversation is always sent whole: `previous_response_id` and `conversation` are refused.
Reference: platform.openai.com/docs/api-reference/responses.
"""

import itertools
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rl_generation.server.generation_request import ChatBody, ResponsesBody, shortened
from rl_generation.server.guard import HttpError

ELSEWHERE: Mapping[str, str] = {
    "conversation": "the conversation whole, as input",
    "function_call": "tool_choice",
    "functions": "tools",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "n": "several requests",
    "previous_response_id": "the conversation whole, as input: nothing is stored here",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
"""Fields of chats alone, or of a server with a store, with what stands for them here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """What a client asked for, and the chat that it means."""

    chat: ChatBody
    echoed: Mapping[str, Any]
    """Fields that the response repeats."""

    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ResponsesRequest":
        """Translate the body of `/v1/responses`.

        Raises:
            HttpError: 400; a field is wrong or needs what a server without a store does not have.
        """
        for name, instead in ELSEWHERE.items():
            if fields.get(name) is not None:
                message = f"{name} is no field of this /v1/responses: here send {instead}"
                raise HttpError(400, message, param=name, code="unknown_field")
        body = ResponsesBody.of(fields)
        text, reasoning = body.text or {}, body.reasoning or {}
        if text.get("verbosity") not in (None, "medium"):
            raise _unsupported("text", f"text takes a format, and no verbosity; got {shortened(text)}")
        if others := [name for name, value in reasoning.items() if name != "effort" and value is not None]:
            rule = "is not supported: the reasoning is part of the text"
            raise _unsupported("reasoning", f"reasoning.{others[0][:80]} {rule}")
        how = text.get("format") or {"type": "text"}
        if not isinstance(how, dict):
            message = f"text.format must be an object; got {shortened(how)}"
            raise HttpError(400, message, param="text", code="invalid_type")
        if how.get("type") == "json_schema":
            how = {"type": "json_schema", "json_schema": how}
        tools, choice = body.tools or [], body.tool_choice
        named = isinstance(choice, dict) and choice.get("type") == "function"
        messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        chat = body.model_dump(include=set(ChatBody.model_fields), exclude_unset=True) | {
            "messages": messages + _messages(body.input),
            "logprobs": bool(body.include),
            "max_completion_tokens": body.max_output_tokens,
            "response_format": how,
            "reasoning_effort": reasoning.get("effort"),
            "tools": [_function(tool) if tool.get("type") == "function" else tool for tool in tools],
            "tool_choice": _function({"type": "function", "name": choice.get("name")}) if named else choice,
        }
        if choice == "auto" and not tools:
            del chat["tool_choice"]
        echoed = {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": fields.get("metadata") or {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text or {"format": {"type": "text"}},
            "tool_choice": choice or "auto",
            "tools": tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
        }
        return cls(chat=ChatBody.of(chat), echoed=echoed)

    async def events(self, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream, from the chunks of the chat's; the last has the whole response.

        Closing it closes `chunks`.
        """
        numbers, opened, text, finish = itertools.count(), False, "", None
        calls: list[dict[str, Any]] = []
        logp: list[dict[str, Any]] = []
        tokens: list[int] = []
        head: dict[str, Any] = {}
        ours: dict[str, Any] = {}
        message: dict[str, Any] = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
        place = {"item_id": message["id"], "output_index": 0, "content_index": 0}

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

        def part() -> dict[str, Any]:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logp}

        async with aclosing(chunks):
            async for chunk in chunks:
                if not head:
                    begun = self._response(chunk, output=[], finish=None)
                    yield event("created", response=begun)
                    yield event("in_progress", response=begun)
                head |= {name: value for name, value in chunk.items() if value is not None}
                for choice in chunk["choices"]:
                    said, news = choice["delta"]["content"], (choice["logprobs"] or {}).get("content") or []
                    calls += choice["delta"].get("tool_calls", ())
                    tokens += choice.get("token_ids", ())
                    if (finish := choice["finish_reason"]) is not None:
                        ours = {name: choice[name] for name in ("weight_versions", "stop_reason")}
                    if not opened and (said or news or (finish is not None and not calls)):
                        yield event("output_item.added", output_index=0, item=_in_progress(message, content=[]))
                        yield event("content_part.added", **place, part=part())
                        opened = True
                    text, logp = text + said, logp + news
                    if said or news:
                        yield event("output_text.delta", **place, delta=said, logprobs=news)
        output = []
        if opened:
            output.append({**message, "status": "completed", "content": [part()]})
            yield event("output_text.done", **place, text=text, logprobs=logp)
            yield event("content_part.done", **place, part=part())
            yield event("output_item.done", output_index=0, item=output[0])
        for call in calls:
            ids = {"id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"]}
            item = {"type": "function_call", **ids, **call["function"], "status": "completed"}
            index, named = len(output), {"item_id": item["id"], "output_index": len(output)}
            yield event("output_item.added", output_index=index, item=_in_progress(item, arguments=""))
            yield event("function_call_arguments.delta", **named, delta=item["arguments"])
            yield event("function_call_arguments.done", **named, **call["function"])
            yield event("output_item.done", output_index=index, item=item)
            output.append(item)
        ours |= {name: head[name] for name in ("weight_version", "logp_of")}
        if "prompt_token_ids" in head:
            ours |= {"prompt_token_ids": head["prompt_token_ids"], "token_ids": tokens}
        whole = self._response(head, output=output, finish=finish) | ours
        yield event("incomplete" if finish == "length" else "completed", response=whole)

    def _response(self, head: Mapping[str, Any], *, output: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
        """The response, from what chunks say of it; `finish` is None while it goes on."""
        usage = head.get("usage")
        status = {None: "in_progress", "length": "incomplete", "abort": "cancelled"}.get(finish, "completed")
        return {
            "id": self.id,
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
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


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, or the choice of one, as chats write it."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat that the items of `input` are."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
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


def _in_progress(item: Mapping[str, Any], **so_far: Any) -> dict[str, Any]:
    return {**item, "status": "in_progress", **so_far}
