"""The HTTP server of an engine and its control port, each an application and the thread that serves it.

    POST /v1/chat/completions   POST /v1/completions   POST /v1/responses   POST /tokenize
    GET /v1/models              GET /v1/models/{model} GET /health          GET /metrics

For a `VllmEngine`, vLLM's own app answers what is asked of the model (`rl_generation.vllm.openai_app`). For the
embedded engine, and any other that streams, the answers are made here: a subset of that. Every body is JSON; every
error has OpenAI's shape.

Both ports are on loopback by default. Another address of the engine's needs an API key: whoever reaches it may use it.
"""

import asyncio
import copy
import os
import socket
import stat
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar, final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rl_generation.chat import encode_text
from rl_generation.detokenizer import Tokenizer
from rl_generation.engine import StreamingEngine, to_prometheus
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.server.answers import Shapes, event_stream, generate, stream, unless_disconnected
from rl_generation.server.generation_request import (
    Body,
    ChatBody,
    CompletionBody,
    GenerationRequest,
    RequestReader,
    TokensBody,
    read_json,
)
from rl_generation.server.guard import (
    Guard,
    HttpError,
    ServerLimits,
    check_api_key,
    error_handlers,
    is_loopback,
    read_body,
)
from rl_generation.server.responses_api import ResponsesRequest
from rl_generation.server.tools import tool_format_of
from rl_generation.vllm.engine import VllmEngine

API_KEY_VARIABLE = "RL_GENERATION_API_KEY"
"""Where `serve` and `Server` look for the API key that they were not given."""

T = TypeVar("T")
R = TypeVar("R")

SERVED = ("limits", "logp_of", "version", "metrics", "stream", "check_health")
"""What is asked of an engine here."""


def create_app(
    engine: StreamingEngine,
    *,
    tokenizer: Tokenizer,
    model_name: str,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    tool_format: str | None = None,
) -> Starlette:
    """Make the ASGI application that serves an engine; the engine stays the caller's to close.

    Args:
        engine: A `TransformersEngine`, a `VllmEngine`, or one of your own that streams.
        tokenizer: The model's; copied, since it is used beside the engine's thread.
        model_name: What clients must call the model, where they name it.
        api_key: Clients must send it, but for `/health`; None answers clients of this machine alone.
        limits: What one client may ask for; None is `ServerLimits()`.
        tool_format: How the model writes calls of tools: "hermes", "llama" or "mistral", or, of a `VllmEngine`, any
            parser of vLLM's; None takes what its chat template or vocabulary names.

    Raises:
        EngineOptionError: The engine does not stream, there is no tokenizer, the format is not known, or the
            vLLM that is installed has no app that this can serve.
        ValueError: The API key is empty, or no text that a header can hold.
    """
    check_api_key(api_key)
    # By its attributes, since an engine that wraps another may pass them on.
    if missing := [name for name in SERVED if not hasattr(engine, name)]:
        raise EngineOptionError(f"{type(engine).__name__} is no StreamingEngine: it has no {', '.join(missing)}")
    if tokenizer is None:
        raise EngineOptionError("tokenizer=None: a server of texts needs the model's tokenizer")
    bounds = ServerLimits() if limits is None else limits
    reader = None
    if not isinstance(engine, VllmEngine):
        reader = RequestReader(
            tokenizer=copy.deepcopy(tokenizer),
            limits=engine.limits,
            bounds=bounds,
            tool_format=tool_format_of(tokenizer, tool_format),
        )
    ours = _Routes(engine, model_name, reader)
    routes = [
        Route("/v1/models", ours.models, methods=["GET"]),
        Route("/v1/models/{model:path}", ours.model, methods=["GET"]),
        Route("/health", ours.health, methods=["GET"]),
        Route("/metrics", ours.metrics, methods=["GET"]),
    ]
    if isinstance(engine, VllmEngine):
        from rl_generation.vllm.openai_app import VllmApp

        app = VllmApp(engine, tokenizer=tokenizer, model_name=model_name, bounds=bounds, tool_parser=tool_format)
        routes += app.routes()
    else:
        routes += [
            Route("/v1/chat/completions", ours.chat, methods=["POST"]),
            Route("/v1/completions", ours.completion, methods=["POST"]),
            Route("/v1/responses", ours.respond, methods=["POST"]),
            Route("/tokenize", ours.tokenize, methods=["POST"]),
        ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, api_key=api_key, bounds=bounds)],
        exception_handlers=error_handlers(),
    )


class _Routes:
    """Answers requests; those for text, of an engine that is not vLLM's, which has a `reader`."""

    def __init__(self, engine: StreamingEngine, model_name: str, reader: RequestReader | None) -> None:
        self._engine, self._model_name = engine, model_name
        self._reader: Any = reader
        self._encoding = asyncio.Lock()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.card()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["model"])
        return JSONResponse(self.card())

    async def health(self, request: Request) -> Response:
        await self._engine.check_health()
        return JSONResponse({"status": "ok", "weight_version": self._engine.version})

    async def metrics(self, request: Request) -> Response:
        text = to_prometheus(self._engine.metrics(), model_name=self._model_name)
        return PlainTextResponse(text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            message = f"the model here is {self._model_name!r}; got {name[:100]!r}"
            raise HttpError(404, message, param="model", code="model_not_found")

    def card(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rl-generation",
            "max_model_len": engine.limits.max_length,
            "vocab_size": engine.limits.vocab_size,
            "logp_of": engine.logp_of,
            "weight_version": engine.version,
        }

    async def chat(self, request: Request) -> Response:
        body = ChatBody.of(await self._fields(request))
        return await self._answer(request, body, self._reader.chat)

    async def completion(self, request: Request) -> Response:
        body = CompletionBody.of(await self._fields(request))
        return await self._answer(request, body, self._reader.completion)

    async def respond(self, request: Request) -> Response:
        asked = ResponsesRequest.of(await self._fields(request))
        return await self._answer(request, asked.chat, self._reader.chat, responses=asked)

    async def tokenize(self, request: Request) -> Response:
        body, reader = TokensBody.of(await self._fields(request)), self._reader
        if body.messages is not None:
            tokens = await self._encode(reader.chat_tokens, body)
        elif body.prompt is not None:
            special = body.add_special_tokens
            tokens = await self._encode(
                lambda prompt: encode_text(reader.tokenizer, prompt, add_special_tokens=special), body.prompt
            )
        else:
            raise HttpError(400, "send prompt, a string, or messages", param="prompt", code="missing_field")
        return JSONResponse({"count": len(tokens), "max_model_len": reader.limits.max_length, "tokens": tokens})

    async def _answer(
        self,
        request: Request,
        body: T,
        read: Callable[[T], GenerationRequest],
        *,
        responses: ResponsesRequest | None = None,
    ) -> Response:
        engine = self._engine
        asked = await self._encode(read, body)
        shapes = Shapes(
            kind="completion" if isinstance(body, CompletionBody) else "chat",
            model_name=self._model_name,
            tokenizer=self._reader.tokenizer,
            logp_of=engine.logp_of,
            asked=asked,
        )
        if responses is not None:
            events = responses.events(shapes.chunks(stream(engine, asked.requests), count=True))
            if not asked.body.stream:
                last = await unless_disconnected(request.receive, _last(events))
                return JSONResponse(last["response"])
        elif asked.body.stream:
            events = shapes.chunks(stream(engine, asked.requests))
        else:
            items = await unless_disconnected(request.receive, generate(engine, asked.requests))
            return JSONResponse(shapes.whole(items))
        # Errors that the first token brings to light still have a status of their own.
        first = await unless_disconnected(request.receive, anext(events))
        return event_stream(first, events)

    async def _encode(self, read: Callable[[T], R], body: T) -> R:
        """Encode beside the event loop, one text at a time: a megabyte of it takes a second."""
        async with self._encoding:
            return await asyncio.to_thread(read, body)

    async def _fields(self, request: Request) -> dict[str, Any]:
        fields = read_json(await read_body(request, self._reader.bounds))
        self.check_model(Body.of(fields, others=fields.keys()).model)
        return fields


async def _last(events: AsyncGenerator[T, None]) -> T:
    async with aclosing(events):
        return [event async for event in events][-1]


# -- The threads that serve -------------------------------------------------------------------------------------------


class HttpThread:
    """An application that is served in a thread of its own, for as long as a `with` block; see `Server`."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, shutdown_timeout_s: int, log_level: str) -> None:
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                access_log=False,
                lifespan="off",
                log_config=None,
                log_level=log_level,
                server_header=False,
                timeout_graceful_shutdown=shutdown_timeout_s,
                ws="none",
            )
        )
        # Bound here, so that the port is known, and connections wait rather than fail until the loop runs.
        self._socket = _listen(host, port)
        self._thread: threading.Thread | None = None
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread = threading.Thread(target=self.run, name=f"rl-generation-http-{self.port}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving, as `stop` says, and wait for it."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def run(self) -> None:
        """Serve in this thread until `stop`, or, in the main thread, an interrupt or a termination signal."""
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._socket.close()

    def stop(self) -> None:
        """Tell the server to end; from any thread."""
        self._uvicorn.should_exit = True


@final
class Server(HttpThread):
    """An HTTP server in a thread of its own, for as long as a `with` block; the engine stays the caller's to close.

    Its end lets requests finish for `shutdown_timeout_s`, then aborts them in the engine.

    Args:
        engine: See `create_app`, as for `tokenizer`, `model_name`, `tool_format` and `limits`.
        host: Address to listen on; other than loopback needs an API key.
        port: To listen on; 0 takes a free one, which `port` then says.
        api_key: None takes it from the environment variable `RL_GENERATION_API_KEY`, where it is set.
        shutdown_timeout_s: Whole seconds for requests in flight at the end.
        log_level: Of uvicorn's loggers; it never logs headers.

    Attributes:
        host: Where it listens.
        port: Where it listens.
        url: Of its root.

    Raises:
        EngineOptionError: `host` is not loopback and there is no API key.
        OSError: The address is taken, or not this machine's.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        *,
        tokenizer: Tokenizer,
        model_name: str,
        tool_format: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        shutdown_timeout_s: int = 10,
        log_level: str = "warning",
    ) -> None:
        key = _key_for(host, api_key)
        app = create_app(
            engine,
            tokenizer=tokenizer,
            model_name=model_name,
            api_key=key,
            limits=limits,
            tool_format=tool_format,
        )
        super().__init__(app, host=host, port=port, shutdown_timeout_s=shutdown_timeout_s, log_level=log_level)


def check_address(host: str, port: int, *, api_key: str | None = None) -> None:
    """Refuse an address at which a `Server` could not listen now, before there is an engine.

    Raises:
        EngineOptionError: `host` is not loopback and there is no API key.
        ValueError: The API key is empty, or no text that a header can hold.
        OSError: The address is taken, or not this machine's.
    """
    check_api_key(_key_for(host, api_key))
    _listen(host, port).close()


def _key_for(host: str, api_key: str | None) -> str | None:
    """Return the API key as given, or else of the environment; refuse to be open to other machines without one."""
    key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
    if key is None and not is_loopback(host):
        raise EngineOptionError(
            f"host={host!r} is open to other machines, and whoever reaches it may use the engine: give an api_key "
            f"(or set {API_KEY_VARIABLE}), or listen on 127.0.0.1"
        )
    return key


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


# -- The control port -------------------------------------------------------------------------------------------------


@final
class ControlServer(HttpThread):
    """The control port of an engine, never the public one, in a thread of its own for as long as a `with` block.

        GET /state   POST /pause   POST /resume   POST /sleep   POST /wake_up

    Each answers `{"paused": …, "weight_version": …}`. Whoever may call it can stop the engine for all of its clients,
    so it asks for a token of its own, even on this machine. An engine that sleeps has freed its device's memory and
    keeps the weights in the host's; vLLM's can. Weights do not come in here, and neither does their version: the refit
    that writes them commits it.

    A pause freezes what is under way between two tokens; what is asked for meanwhile waits, and its time runs.

    Args:
        engine: As it is served; it is not closed here.
        token: Clients send it as `Authorization: Bearer …`; see `read_token`.
        host: Address to listen on. Beyond loopback the token travels as it is: use a network of your own, or a tunnel.
        port: To listen on; 0 takes a free one.
        routes: Further routes, such as those by which a trainer arranges its refits.

    Raises:
        EngineOptionError: The engine cannot pause.
        ValueError: The token is empty, or no text that a header can hold.
        OSError: The address is taken, or not this machine's.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        routes: Sequence[Route] = (),
    ) -> None:
        check_api_key(token)
        given: Any = engine
        if not all(hasattr(given, name) for name in ("pause", "resume", "is_paused")):
            raise EngineOptionError(f"{type(engine).__name__} cannot pause: a control port needs one that can")

        async def state(_request: Request) -> Response:
            paused = await asyncio.to_thread(lambda: bool(given.is_paused))
            return JSONResponse({"paused": paused, "weight_version": engine.version})

        def after(act: Callable[[], None]) -> Callable[[Request], Any]:
            async def route(request: Request) -> Response:
                try:
                    await asyncio.to_thread(act)  # which waits for the step that is under way
                except (EngineOptionError, ModelError) as error:  # it cannot sleep, or not now
                    raise HttpError(409, str(error), code="engine_refuses") from error
                return await state(request)

            return route

        def cannot() -> None:
            raise EngineOptionError(f"{type(engine).__name__} cannot sleep: vLLM's engine can")

        own = [
            Route("/sleep", after(getattr(given, "sleep", cannot)), methods=["POST"]),
            Route("/wake_up", after(getattr(given, "wake_up", cannot)), methods=["POST"]),
            Route("/state", state, methods=["GET"]),
            Route("/pause", after(lambda: given.pause(mode="keep")), methods=["POST"]),
            Route("/resume", after(given.resume), methods=["POST"]),
        ]
        guard = Middleware(Guard, api_key=token, bounds=ServerLimits())  # compares in constant time
        app = Starlette(routes=[*own, *routes], middleware=[guard], exception_handlers=error_handlers())
        super().__init__(app, host=host, port=port, shutdown_timeout_s=1, log_level="warning")


def read_token(*, variable: str | None = None, file: str | None = None) -> str:
    """Return the token of a control port, from an environment variable or a private file.

    Raises:
        EngineOptionError: None or both are named, the one that is named has no token, or others may read the file.
    """
    if (variable is None) == (file is None):
        raise EngineOptionError("a control port needs a token: name an environment variable or a file with it")
    if variable is not None:
        token = os.environ.get(variable, "").strip()
        if not token:
            raise EngineOptionError(f"the environment variable {variable} is not set, or empty")
        return token
    path = Path(str(file)).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise EngineOptionError(f"{path} can be read by others, and holds a token: chmod 600 {path}")
        token = path.read_text().strip()
    except OSError as error:
        raise EngineOptionError(f"the token of the control port cannot be read: {error}") from None
    if not token:
        raise EngineOptionError(f"{path} is empty, and should hold the token of the control port")
    return token
