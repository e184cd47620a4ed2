"""Streams answers as server-sent events. Knows OpenAI's chunks through `responses`; does not know what made the tokens.

Every delta of the engine becomes a chunk, though its text may be empty as long as a character is not complete or may
belong to a stop string: token ids and logp are never held back. After the last answer come a chunk that counts tokens,
where it was asked for, and `[DONE]`. An error underway is an event with `error`, and the last one.
"""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rl_generation.engine import RolloutDelta
from rl_generation.server.errors import HttpError, internal
from rl_generation.server.generation import Item, unless_disconnected
from rl_generation.server.responses import ChoiceText, Shapes, ending, usage

__all__ = ["EventStream", "chunks"]

LOG = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


@final
class EventStream(Response):
    """A response of server-sent events that ends, and closes its source, as soon as the client disconnects.

    Args:
        first: What is sent as the JSON of the first event.
        rest: What follows; closed in any case.
        headers: Of the response.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None], *, headers: dict[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._first = first
        self._rest = rest
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._rest):
            await unless_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_event(send, _event(self._first))
        try:
            async for chunk in self._rest:
                await _send_event(send, _event(chunk))
        except HttpError as error:
            await _send_event(send, _event(error.body))
        except Exception:
            LOG.exception("a stream ended with an unforeseen error")
            await _send_event(send, _event(internal().body))
        else:
            await _send_event(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def chunks(
    shapes: Shapes, deltas: AsyncGenerator[Item, None], *, count: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of all answers as their tokens come; closing it closes `deltas`.

    The last chunk counts tokens where the client asked for that, or the caller does by `count`.
    """
    requests, n = shapes.asked.requests, shapes.asked.n
    texts: dict[int, ChoiceText] = {}
    versions: list[int] = []
    generated = 0
    async with aclosing(deltas):
        async for index, delta in deltas:
            choice = index * n + delta.sample_index
            opening: dict[str, Any] = {}
            if choice not in texts:
                texts[choice] = shapes.choice_text(requests[index])
                opening = shapes.prompt_of_completion(requests[index])
                if shapes.kind == "chat":
                    yield shapes.opening(choice)
            body = {"index": choice, **_content(shapes, texts[choice], delta), **opening}
            generated += len(delta.tokens)
            if delta.rollout is None:
                yield shapes.chunk([body])
            else:
                versions.append(delta.rollout.version)
                yield shapes.chunk([body], weight_version=delta.rollout.version)
    if count or shapes.asked.include_usage:
        yield shapes.chunk([], usage=usage(requests, generated), weight_version=min(versions))


def _content(shapes: Shapes, decoding: ChoiceText, delta: RolloutDelta) -> dict[str, Any]:
    text, offsets, reply = decoding.take(delta)
    ends = {"finish_reason": None} if delta.rollout is None else ending(delta.rollout, reply.calls)
    message: dict[str, Any] = {"content": text}
    if reply.calls:
        message["tool_calls"] = [{"index": index, **call.body} for index, call in enumerate(reply.calls)]
    return {
        **({"delta": message} if shapes.kind == "chat" else {"text": text}),
        "logprobs": shapes.tokens(delta.tokens, logp=delta.logp, top_logp=delta.top_logp, offsets=offsets),
        **ends,
        **shapes.token_ids(delta.tokens),
    }


def _event(content: dict[str, Any]) -> bytes:
    name = f"event: {content['type']}\n".encode() if "type" in content else b""  # of the Responses API
    return (
        name
        + b"data: "
        + json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        + b"\n\n"
    )


async def _send_event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
