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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rl_generation.chat import decode_rollout
from rl_generation.detokenizer import Detokenizer
from rl_generation.engine import RolloutDelta, StreamingEngine
from rl_generation.errors import EngineDeadError, SampleTimeoutError
from rl_generation.requests import Request
from rl_generation.rollout import LogpOf, Rollout, VersionSpan
from rl_generation.server.generation_request import GenerationRequest
from rl_generation.server.guard import ClientGoneError, HttpError, from_engine, internal
from rl_generation.server.tools import ReplyStream, ToolCall, ToolUse, overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["EventStream", "Shapes", "generate", "spans_as_json", "stream", "to_json", "unless_disconnected"]

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Item = tuple[int, RolloutDelta]
"""The index of a request, and its next delta."""

Kind = Literal["chat", "completion"]


# -- From the engine --------------------------------------------------------------------------------------------------


async def generate(engine: StreamingEngine, requests: Sequence[Request]) -> list[Rollout]:
    """Answer all requests, as `stream` does; rollouts come in order of request, then of sample."""
    async with aclosing(stream(engine, requests)) as items:
        whole = [(index, delta.rollout) async for index, delta in items if delta.rollout is not None]
    return [rollout for _, rollout in sorted(whole, key=lambda item: (item[0], item[1].sample_index))]


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
    """Do `work`, or cancel it and raise ClientGoneError as soon as the client disconnects; its body has been read."""

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnection())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        await _end([working, watching])


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- Text -------------------------------------------------------------------------------------------------------------


@final
class AnswerText:
    """Decodes one answer while it grows, and divides it into what is said and the calls that it turns out to hold.

    Text is given out once no further token can change it: not before it is certain, and not while its end may be the
    beginning of a stop string. So the pieces joined are the text of the whole answer, cut where its stop string began.

    Args:
        tokenizer: Of the model.
        stop: Strings that may end the answer.
        include_stop_string: Whether its text holds the one that did.
        prompt: What it answers.
        kept: Special tokens that are written out, with their text; the others are left out.
        tools: How calls are found.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        stop: Sequence[str],
        include_stop_string: bool,
        prompt: Sequence[int] = (),
        kept: Mapping[int, str] | None = None,
        tools: ToolUse | None = None,
    ) -> None:
        self._tokenizer, self._text = tokenizer, Detokenizer(tokenizer, prompt)
        self._stop, self._include_stop_string, self._kept = stop, include_stop_string, kept or {}
        self._reply = ReplyStream(tools)
        self._held = ""
        self._length = 0

    def take(self, delta: RolloutDelta) -> tuple[str, list[int], tuple[ToolCall, ...]]:
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
            return said, offsets, ()
        text = self._held + self._text.pending
        if isinstance(ended.stop_reason, str) and (start := text.find(ended.stop_reason)) >= 0:
            text = text[: start + len(ended.stop_reason) if self._include_stop_string else start]
        said += self._reply.push(text)
        reply = self._reply.finish()
        return said + reply.content, offsets, reply.calls


# -- Shapes -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Writes one response."""

    kind: Kind
    model_name: str
    tokenizer: "PreTrainedTokenizerBase"
    logp_of: LogpOf
    asked: GenerationRequest
    number: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """Of the response."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.number}"

    def whole(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """The response that is not streamed; rollouts in order of prompt, then of sample."""
        asked, choices = self.asked, []
        for index, rollout in enumerate(rollouts):
            request = asked.requests[index // asked.n]
            offsets: list[int] = []
            calls: tuple[ToolCall, ...] = ()
            if asked.logp or asked.tools or asked.kept:
                delta = RolloutDelta(sample_index=0, tokens=rollout.tokens, logp=rollout.logp, rollout=rollout)
                text, offsets, calls = self._text_of(request).take(delta)
            else:  # at once, where nobody needs to know which token made which character
                include = asked.body.include_stop_str_in_output
                text = decode_rollout(self.tokenizer, rollout, prompt=request.prompt, include_stop_string=include)
            message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
            if calls:
                message["tool_calls"] = [call.body for call in calls]
            said = {"message": message} if self.kind == "chat" else {"text": text}
            choice = self._choice(index, said, made=rollout, offsets=offsets, ended=rollout, calls=len(calls))
            choices.append(choice | self._prompt("completion", request))
        return {
            **self._head("chat.completion" if self.kind == "chat" else "text_completion"),
            "choices": choices,
            "usage": self._usage(sum(len(rollout.tokens) for rollout in rollouts)),
            "weight_version": min(rollout.version for rollout in rollouts),
            **self._prompt("chat", asked.requests[0]),
        }

    async def chunks(
        self, deltas: AsyncGenerator[Item, None], *, count: bool = False
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of all answers as their tokens come; closing it closes `deltas`.

        The last chunk counts tokens where the client asked for that, or the caller does by `count`.
        """
        texts: dict[int, AnswerText] = {}
        versions: list[int] = []
        generated = 0
        async with aclosing(deltas):
            async for number, delta in deltas:
                request, index = self.asked.requests[number], number * self.asked.n + delta.sample_index
                opening: dict[str, Any] = {}
                if index not in texts:
                    texts[index] = self._text_of(request)
                    opening = self._prompt("completion", request)
                    if self.kind == "chat":  # whose message it is
                        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                        yield self._chunk([{"index": index, **first}], **self._prompt("chat", request))
                text, offsets, calls = texts[index].take(delta)
                message: dict[str, Any] = {"content": text}
                if calls:
                    message["tool_calls"] = [{"index": place, **call.body} for place, call in enumerate(calls)]
                said = {"delta": message} if self.kind == "chat" else {"text": text}
                ended = delta.rollout
                choice = self._choice(index, said, made=delta, offsets=offsets, ended=ended, calls=len(calls)) | opening
                generated += len(delta.tokens)
                versions += [] if ended is None else [ended.version]
                yield self._chunk([choice], **({} if ended is None else {"weight_version": ended.version}))
        if count or self._counts_usage:
            yield self._chunk([], usage=self._usage(generated), weight_version=min(versions))

    @property
    def _counts_usage(self) -> bool:
        options = self.asked.body.stream_options
        return options is not None and options.include_usage

    def _text_of(self, request: Request) -> AnswerText:
        return AnswerText(
            self.tokenizer,
            stop=request.sampling.stop,
            include_stop_string=self.asked.body.include_stop_str_in_output,
            prompt=request.prompt,
            kept=self.asked.kept,
            tools=self.asked.tools,
        )

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **others: Any) -> dict[str, Any]:
        unknown = {"usage": None} if self._counts_usage else {}
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": list(choices), **unknown, **others}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model_name}
        return {**head, "logp_of": self.logp_of}

    def _choice(
        self,
        index: int,
        said: Mapping[str, Any],
        *,
        made: RolloutDelta | Rollout,
        offsets: Sequence[int],
        ended: Rollout | None,
        calls: int,
    ) -> dict[str, Any]:
        """What `made` adds to a choice that says `said`, and how it `ended`, with so many calls."""
        ending: dict[str, Any] = {"finish_reason": None}
        if ended is not None:
            ending = {
                "finish_reason": "tool_calls" if calls and ended.finish_reason == "stop" else ended.finish_reason,
                "stop_reason": ended.stop_reason,
                "weight_versions": spans_as_json(ended.versions),
            }
        ids = {"token_ids": list(made.tokens)} if self.asked.body.return_token_ids else {}
        return {"index": index, **said, "logprobs": self._logp(made, offsets), **ending, **ids}

    def _prompt(self, kind: Kind, request: Request) -> dict[str, Any]:
        """The field that repeats the prompt, where it was asked for; of a chat's response, of a completion's choice."""
        wanted = self.kind == kind and self.asked.body.return_token_ids
        return {"prompt_token_ids": list(request.prompt)} if wanted else {}

    def _logp(self, made: RolloutDelta | Rollout, offsets: Sequence[int]) -> dict[str, Any] | None:
        """Of some tokens, in the shape of the route; None where nobody asked."""
        if not self.asked.logp:
            return None
        places = made.top_logp or [()] * len(made.tokens)
        tokens = list(zip(made.tokens, made.logp, places, strict=True))
        if self.kind == "completion":
            names = [self._name(token) for token in made.tokens]
            best: list[dict[str, float]] | None = None
            if self.asked.top_logp:  # with the sampled token itself, as at OpenAI
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


def spans_as_json(spans: Sequence[VersionSpan]) -> list[dict[str, int]]:
    """Which weights made which tokens."""
    return [{"version": span.version, "start": span.start, "end": span.end} for span in spans]


# -- Server-sent events -----------------------------------------------------------------------------------------------


@final
class EventStream(StreamingResponse):
    """A response of server-sent events that ends, and closes its source, as soon as the client disconnects.

    Args:
        first: What is sent as the JSON of the first event.
        rest: What follows; closed in any case.
        headers: Of the response.
    """

    def __init__(
        self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None], *, headers: dict[str, str]
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(_events(first, rest), media_type="text/event-stream", headers=headers)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._rest):
            await unless_disconnected(receive, self.stream_response(send))


async def _events(first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    def event(content: dict[str, Any]) -> bytes:
        name = f"event: {content['type']}\n" if "type" in content else ""  # of the Responses API
        return name.encode() + b"data: " + to_json(content) + b"\n\n"

    try:
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
