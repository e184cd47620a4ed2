"""Answers of the embedded engine, and of any other that streams, in OpenAI's shapes, whole or as server-sent events.

Beyond OpenAI's fields: `stop_reason`, `token_ids` and `prompt_token_ids` are vLLM's; `weight_version` (of the oldest
weights that made any token) and `logp_of` of a response, and `weight_versions` of a choice (which weights made which
tokens, `[start, end)`), are this package's.

Every delta of the engine becomes a chunk, though its text may be empty as long as a character is not complete or may
belong to a stop string: token ids and logp are never held back. After the last answer come a chunk that counts tokens,
where it was asked for, and `[DONE]`. An error underway is an event with `error`, and the last one.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive

from rl_generation.detokenizer import Detokenizer, Tokenizer
from rl_generation.engine import RolloutDelta, StreamingEngine
from rl_generation.errors import EngineDeadError, SampleTimeoutError
from rl_generation.requests import Request
from rl_generation.rollout import LogpOf
from rl_generation.server.generation_request import GenerationRequest
from rl_generation.server.guard import HttpError, from_engine, internal
from rl_generation.server.tools import ReplyStream, ToolCall, overlap

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Item = tuple[int, RolloutDelta]
"""The index of a request, and its next delta."""

Kind = Literal["chat", "completion"]


# -- From the engine --------------------------------------------------------------------------------------------------


async def generate(engine: StreamingEngine, requests: Sequence[Request]) -> list[Item]:
    """Answer all requests, as `stream` does; of each answer one delta, the whole, in order of request and sample."""
    async with aclosing(stream(engine, requests)) as items:
        ended = [(index, delta, delta.rollout) async for index, delta in items if delta.rollout is not None]
    ended.sort(key=lambda item: (item[0], item[1].sample_index))
    return [
        (index, replace(last, tokens=whole.tokens, logp=whole.logp, top_logp=whole.top_logp))
        for index, last, whole in ended
    ]


async def stream(engine: StreamingEngine, requests: Sequence[Request]) -> AsyncGenerator[Item, None]:
    """Yield the deltas of all requests as they come; closing it aborts what is unfinished.

    Raises:
        HttpError: The engine failed or refused; the other requests are then aborted.
    """
    # Of one place, so that an engine sees a consumer that is slow, and puts deltas together.
    items: asyncio.Queue[Item | Exception | None] = asyncio.Queue(1)

    async def feed(index: int, request: Request) -> None:
        try:
            async with aclosing(engine.stream(request.prompt, request.sampling)) as deltas:
                async for delta in deltas:
                    await items.put((index, delta))
        except Exception as error:  # noqa: BLE001 - raised by whoever takes it
            await items.put(error)
        else:
            await items.put(None)

    feeders = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    unfinished = len(feeders)
    try:
        while unfinished:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    except (EngineDeadError, SampleTimeoutError, ValueError) as error:
        raise from_engine(error) from error
    finally:
        await _end(feeders)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Do `work`, or cancel it and raise ClientDisconnect as soon as the client disconnects; its body has been read."""

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnection())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _end([working, watching])


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- Text -------------------------------------------------------------------------------------------------------------


class AnswerText:
    """Decodes one answer while it grows, and divides it into what is said and the calls that it turns out to hold.

    Text is given out once no further token can change it: not before it is certain, and not while its end may be the
    beginning of a stop string. So the pieces joined are the text of the whole answer, cut where its stop string began.
    """

    def __init__(self, tokenizer: Tokenizer, asked: GenerationRequest, request: Request) -> None:
        self._tokenizer, self._text = tokenizer, Detokenizer(tokenizer, request.prompt)
        self._stop, self._include_stop_string = request.sampling.stop, asked.body.include_stop_str_in_output
        self._kept, self._reply = asked.kept, ReplyStream(asked.tools)
        self._held = ""
        self._length = 0

    def take(self, delta: RolloutDelta) -> tuple[str, list[int], list[ToolCall]]:
        """Return what is certainly said now, the text offset of each new token, and, with the last delta, the calls."""
        offsets, said, ended = [], "", delta.rollout
        for token in delta.tokens:
            offsets.append(self._length)
            stops = ended is not None and len(offsets) == len(delta.tokens) and isinstance(ended.stop_reason, int)
            if token in self._kept and not stops:
                fresh = self._text.pending + self._kept[token]
                self._text = Detokenizer(self._tokenizer, [token])
            else:
                fresh = self._text.push(token)
            self._length += len(fresh)
            text = self._held + fresh
            certain = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
            said += self._reply.push(text[:certain])
            self._held = text[certain:]
        if ended is None:
            return said, offsets, []
        text = self._held + self._text.pending
        if isinstance(ended.stop_reason, str) and (start := text.find(ended.stop_reason)) >= 0:
            text = text[: start + len(ended.stop_reason) if self._include_stop_string else start]
        said += self._reply.push(text)
        content, calls = self._reply.finish()
        return said + content, offsets, calls


# -- Shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Writes one response."""

    kind: Kind
    model_name: str
    tokenizer: Tokenizer
    logp_of: LogpOf
    asked: GenerationRequest
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    texts: dict[int, AnswerText] = field(default_factory=dict)
    """Of the choices that have begun."""

    def whole(self, items: Sequence[Item]) -> dict[str, Any]:
        """The response that is not streamed."""
        return {
            **self._head("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": [self._choice(number, delta, part="message") for number, delta in items],
            "usage": self._usage(sum(len(delta.tokens) for _, delta in items)),
            "weight_version": min(delta.rollout.version for _, delta in items if delta.rollout),
            **self._prompt("chat", self.asked.requests[0]),
        }

    async def chunks(
        self, items: AsyncGenerator[Item, None], *, count: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of all answers as their tokens come; closing it closes `items`.

        The last chunk counts tokens where the client asked for that, or the caller does by `count`.
        """
        versions: list[int] = []
        generated = 0
        asked_for = bool((self.asked.body.stream_options or {}).get("include_usage"))
        head = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        head |= {"usage": None} if asked_for else {}
        async with aclosing(items):
            async for number, delta in items:
                request = self.asked.requests[number]
                index = number * request.sampling.n + delta.sample_index
                if self.kind == "chat" and index not in self.texts:  # whose message it is
                    first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                    prompt = self._prompt("chat", request)
                    yield {**head, "choices": [{"index": index, **first}], **prompt}
                chunk = {**head, "choices": [self._choice(number, delta, part="delta")]}
                generated += len(delta.tokens)
                if delta.rollout is not None:
                    versions.append(delta.rollout.version)
                    chunk["weight_version"] = delta.rollout.version
                yield chunk
        if count or asked_for:
            yield {**head, "choices": [], "usage": self._usage(generated), "weight_version": min(versions)}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.number}"
        head = {"id": name, "object": kind, "created": self.created, "model": self.model_name}
        return {**head, "logp_of": self.logp_of}

    def _choice(self, number: int, delta: RolloutDelta, *, part: Literal["message", "delta"]) -> dict[str, Any]:
        """What a delta adds to its choice; of a response that is not streamed, the choice itself."""
        asked, request, ended = self.asked, self.asked.requests[number], delta.rollout
        index, opening = number * request.sampling.n + delta.sample_index, {}
        if index not in self.texts:
            self.texts[index], opening = AnswerText(self.tokenizer, asked, request), self._prompt("completion", request)
        text, offsets, calls = self.texts[index].take(delta)
        said: dict[str, Any] = {"text": text}
        if self.kind == "chat":
            said = {part: {"content": text}}
            if part == "message":
                said = {part: {"role": "assistant", "content": text or None if calls else text}}
            if calls:
                places = [{"index": place} if part == "delta" else {} for place in range(len(calls))]
                said[part]["tool_calls"] = [place | call for place, call in zip(places, calls, strict=True)]
        ending: dict[str, Any] = {"finish_reason": None}
        if ended is not None:
            ending = {
                "finish_reason": "tool_calls" if calls and ended.finish_reason == "stop" else ended.finish_reason,
                "stop_reason": ended.stop_reason,
                "weight_versions": [asdict(span) for span in ended.versions],
            }
        ids = {"token_ids": list(delta.tokens)} if asked.body.return_token_ids else {}
        return {"index": index, **said, "logprobs": self._logp(delta, offsets), **ending, **ids, **opening}

    def _prompt(self, kind: Kind, request: Request) -> dict[str, Any]:
        """The field that repeats the prompt, where it was asked for; of a chat's response, of a completion's choice."""
        wanted = self.kind == kind and self.asked.body.return_token_ids
        return {"prompt_token_ids": list(request.prompt)} if wanted else {}

    def _logp(self, made: RolloutDelta, offsets: Sequence[int]) -> dict[str, Any] | None:
        """Of some tokens, in the shape of the route; None where nobody asked."""
        if not self.asked.logp:
            return None
        places = made.top_logp or [()] * len(made.tokens)
        tokens = list(zip(made.tokens, made.logp, places, strict=True))
        if self.kind == "completion":
            names = [self._name(token) for token in made.tokens]
            best: list[dict[str, float]] | None = None
            if self.asked.requests[0].sampling.top_logp:  # with the sampled token itself, as at OpenAI
                best = [
                    {self._name(token): logp} | {self._name(other): each for other, each in likeliest}
                    for token, logp, likeliest in tokens
                ]
            logp = list(made.logp)
            return {"tokens": names, "token_logprobs": logp, "top_logprobs": best, "text_offset": list(offsets)}
        content = [
            {**self._entry(token, logp), "top_logprobs": [self._entry(other, each) for other, each in likeliest]}
            for token, logp, likeliest in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self._text(token)
        # The tokenizer does not say which bytes a token is that is no whole character.
        return {
            "token": self._name(token),
            "logprob": logp,
            "bytes": None if "\ufffd" in text else list(text.encode()),
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.body.return_tokens_as_token_ids else self._text(token)

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _usage(self, generated: int) -> dict[str, int]:
        """Tokens that were read and written; a prompt with several answers is read once."""
        read = sum(len(request.prompt) for request in self.asked.requests)
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


# -- Server-sent events -----------------------------------------------------------------------------------------------


def event_stream(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> StreamingResponse:
    """A response of server-sent events; as soon as the client disconnects, it ends and closes `rest`."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(first, rest), media_type="text/event-stream", headers=headers)


async def _events(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    def event(content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if "type" in content else ""  # of the Responses API
        return name.encode() + b"data: " + to_json(content) + b"\n\n"

    try:
        async with aclosing(rest):
            yield event(first)
            async for content in rest:
                yield event(content)
        yield b"data: [DONE]\n\n"
    except HttpError as error:
        yield event(error.body)
    except Exception:
        LOG.exception("a stream ended with an unforeseen error")
        yield event(internal().body)


def to_json(content: Mapping[str, Any]) -> bytes:
    """A body, or the data of an event."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
