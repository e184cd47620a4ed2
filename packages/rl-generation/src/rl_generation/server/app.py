"""The routes: OpenAI's for text and chat, vLLM's for tokens.

    POST /v1/chat/completions   POST /v1/completions   POST /v1/responses
    GET /v1/models              GET /v1/models/{model} GET /health         GET /metrics
    POST /tokenize              POST /detokenize

For a `VllmEngine`, vLLM's own app answers all but health and metrics (`rl_generation.vllm.openai_app`). For the
embedded engine, and any other that streams, the answers are made here: a subset of that. Every body is JSON; every
error has OpenAI's shape.
"""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rl_generation.chat import encode_text
from rl_generation.detokenizer import decode
from rl_generation.engine import StreamingEngine, to_prometheus
from rl_generation.errors import EngineOptionError, PromptError
from rl_generation.requests import check_token_ids
from rl_generation.server.answers import EventStream, Shapes, generate, stream, unless_disconnected
from rl_generation.server.bodies import Body, ChatBody, CompletionBody, TokensBody, read_json
from rl_generation.server.generation_request import GenerationRequest, RequestReader
from rl_generation.server.guard import (
    Guard,
    HttpError,
    ServerLimits,
    check_api_key,
    error_handlers,
    from_engine,
    read_body,
)
from rl_generation.server.responses_api import ResponsesRequest
from rl_generation.server.tools import detect_tool_format, tool_format_of
from rl_generation.vllm.engine import VllmEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["create_app"]

T = TypeVar("T")
R = TypeVar("R")

STREAMING = ("engine", "stream", "abort", "check_health")
STEPPING = ("add_request", "step", "abort_request", "has_unfinished_requests")
"""What the protocols of these names have."""


def create_app(
    streaming_engine: StreamingEngine,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    model_name: str,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    tool_format: str | None = None,
) -> Starlette:
    """Make the ASGI application that serves an engine; the engine stays the caller's to close.

    Args:
        streaming_engine: A `VllmEngine`, or `Streamer(engine)` of one that steps.
        tokenizer: The model's; copied, since it is used beside the engine's thread.
        model_name: What clients must call the model, where they name it.
        api_key: Clients must send it, but for `/health`; None answers clients of this machine alone.
        limits: What one client may ask for; None is `ServerLimits()`.
        tool_format: How the model writes calls of tools: "hermes", "llama" or "mistral", or, of a `VllmEngine`, any
            parser of vLLM's; None takes what its chat template or vocabulary names.

    Raises:
        EngineOptionError: `streaming_engine` does not stream, there is no tokenizer, the format is not known, or the
            vLLM that is installed has no app that this can serve.
        ValueError: The API key is empty, or no text that a header can hold.
    """
    check_api_key(api_key)
    # By its attributes, since an engine that wraps another may pass them on.
    if missing := [name for name in STREAMING if not hasattr(streaming_engine, name)]:
        name = type(streaming_engine).__name__
        if all(hasattr(streaming_engine, each) for each in STEPPING):
            raise EngineOptionError(f"{name} steps but does not stream: pass Streamer(engine)")
        raise EngineOptionError(f"{name} is no StreamingEngine: it has no {', '.join(missing)}")
    if tokenizer is None:
        raise EngineOptionError("tokenizer=None: a server of texts needs the model's tokenizer")
    bounds = ServerLimits() if limits is None else limits
    about = _About(streaming_engine, model_name)
    routes = [
        Route("/v1/models/{model:path}", about.model, methods=["GET"]),
        Route("/health", about.health, methods=["GET"]),
        Route("/metrics", about.metrics, methods=["GET"]),
    ]
    if isinstance(streaming_engine, VllmEngine):
        from rl_generation.vllm.openai_app import VllmApp

        own = VllmApp(
            streaming_engine, tokenizer=tokenizer, model_name=model_name, bounds=bounds, tool_parser=tool_format
        )
        routes += own.routes()
    else:
        written = detect_tool_format(tokenizer) if tool_format is None else tool_format_of(tool_format)
        reader = RequestReader(
            tokenizer=copy.deepcopy(tokenizer),
            limits=streaming_engine.engine.limits,
            bounds=bounds,
            tool_format=written,
        )
        ours = _Routes(about, reader)
        routes += [
            Route("/v1/chat/completions", ours.chat, methods=["POST"]),
            Route("/v1/completions", ours.completion, methods=["POST"]),
            Route("/v1/responses", ours.respond, methods=["POST"]),
            Route("/v1/models", about.models, methods=["GET"]),
            Route("/tokenize", ours.tokenize, methods=["POST"]),
            Route("/detokenize", ours.detokenize, methods=["POST"]),
        ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, api_key=api_key, bounds=bounds)],
        exception_handlers=error_handlers(),
    )


@final
@dataclass(frozen=True, slots=True)
class _About:
    """What is said of an engine, whoever answers for it."""

    streaming: StreamingEngine
    model_name: str

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await self.card()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["model"])
        return JSONResponse(await self.card())

    async def health(self, request: Request) -> Response:
        await self.streaming.check_health()
        return JSONResponse({"status": "ok", "weight_version": await self.version()})

    async def metrics(self, request: Request) -> Response:
        text = to_prometheus(await self.streaming.read_metrics(), model_name=self.model_name)
        return PlainTextResponse(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"the model here is {self.model_name!r}; got {name[:100]!r}"
            raise HttpError(404, message, param="model", code="model_not_found")

    async def version(self) -> int:
        return (await self.streaming.read_metrics()).version

    async def card(self) -> dict[str, Any]:
        engine = self.streaming.engine
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rl-generation",
            "max_model_len": engine.limits.max_length,
            "vocab_size": engine.limits.vocab_size,
            "logp_of": engine.logp_of,
            "weight_version": await self.version(),
        }


@final
@dataclass(frozen=True, slots=True)
class _Routes:
    """Answers for an engine that is not vLLM's."""

    about: _About
    reader: RequestReader
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def chat(self, request: Request) -> Response:
        body = ChatBody.of(await self._fields(request))
        return await self._answer(request, body, self.reader.chat)

    async def completion(self, request: Request) -> Response:
        body = CompletionBody.of(await self._fields(request))
        return await self._answer(request, body, self.reader.completion)

    async def respond(self, request: Request) -> Response:
        asked = ResponsesRequest.of(await self._fields(request))
        return await self._answer(request, asked.chat, self.reader.chat, responses=asked)

    async def tokenize(self, request: Request) -> Response:
        body, reader = TokensBody.of(await self._fields(request)), self.reader
        if body.messages is not None:
            tokens = await self._encode(reader.chat_tokens, body)
        elif body.prompt is not None:
            special = body.add_special_tokens
            tokens = await self._encode(
                lambda prompt: encode_text(reader.tokenizer, prompt, add_special_tokens=special), body.prompt
            )
        else:
            raise HttpError(400, "send prompt, a string, or messages", param="prompt", code="missing_field")
        names = reader.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        said = {"count": len(tokens), "max_model_len": reader.limits.max_length, "tokens": tokens, "token_strs": names}
        return JSONResponse(said)

    async def detokenize(self, request: Request) -> Response:
        tokens, tokenizer = TokensBody.of(await self._fields(request)).tokens, self.reader.tokenizer
        if tokens is None:
            raise HttpError(400, "send tokens, a list of token ids", param="tokens", code="missing_field")
        try:
            check_token_ids(tokens, vocab_size=self.reader.limits.vocab_size, name="tokens")
        except PromptError as error:
            raise from_engine(error) from None
        return JSONResponse({"prompt": decode(tokenizer, tokens, skip_special_tokens=False)})

    async def _answer(
        self,
        request: Request,
        body: T,
        read: Callable[[T], GenerationRequest],
        *,
        responses: ResponsesRequest | None = None,
    ) -> Response:
        streaming = self.about.streaming
        asked = await self._encode(read, body)
        shapes = Shapes(
            kind="completion" if isinstance(body, CompletionBody) else "chat",
            model_name=self.about.model_name,
            tokenizer=self.reader.tokenizer,
            logp_of=streaming.engine.logp_of,
            asked=asked,
        )
        headers = {"X-Request-Id": shapes.id}
        if asked.body.stream:
            # Of the weights that it begins with; the last event says which tokens are whose.
            headers["X-Weight-Version"] = str(await self.about.version())
            events = shapes.chunks(stream(streaming, asked.requests), count=responses is not None)
            if responses is not None:
                events = responses.events(events)
            # Errors that the first token brings to light still have a status of their own.
            first = await unless_disconnected(request.receive, anext(events))
            return EventStream(first, events, headers=headers)
        rollouts = await unless_disconnected(request.receive, generate(streaming, asked.requests))
        versions = sorted({span.version for rollout in rollouts for span in rollout.versions})
        headers["X-Weight-Version"] = ",".join(map(str, versions))
        said = shapes.whole(rollouts)
        return JSONResponse(said if responses is None else responses.body(said), headers=headers)

    async def _encode(self, read: Callable[[T], R], body: T) -> R:
        """Encode beside the event loop, one text at a time: a megabyte of it takes a second."""
        async with self.encoding:
            return await asyncio.to_thread(read, body)

    async def _fields(self, request: Request) -> dict[str, Any]:
        fields = read_json(await read_body(request, self.reader.bounds))
        self.about.check_model(Body.of(fields, others=fields.keys()).model)
        return fields
