"""Runs applications, in a thread beside their caller or as what the process does: the engine's, and its control port.

Both listen on loopback by default. Another address of the engine's needs an API key: whoever reaches it may use it.
"""

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from rl_generation.engine import StreamingEngine
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.server.app import create_app
from rl_generation.server.guard import Guard, HttpError, ServerLimits, check_api_key, error_handlers, is_loopback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["API_KEY_VARIABLE", "ControlServer", "Server", "check_address", "read_token"]

API_KEY_VARIABLE = "RL_GENERATION_API_KEY"
"""Where `serve` and `Server` look for the API key that they were not given."""


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        streaming_engine: See `create_app`, as for `tokenizer`, `model_name`, `tool_format` and `limits`.
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
        streaming_engine: StreamingEngine,
        *,
        tokenizer: "PreTrainedTokenizerBase",
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
            streaming_engine,
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
        streaming_engine: A `Streamer` or a `VllmEngine`, as it is served; it is not closed here.
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
        streaming_engine: StreamingEngine,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        routes: Sequence[Route] = (),
    ) -> None:
        check_api_key(token)
        engine: Any = streaming_engine
        if not all(hasattr(engine, name) for name in ("pause", "resume", "is_paused")):
            raise EngineOptionError(f"{type(engine).__name__} cannot pause: a control port needs one that can")

        async def state(_request: Request) -> Response:
            paused = await asyncio.to_thread(lambda: bool(engine.is_paused))
            return JSONResponse({"paused": paused, "weight_version": (await engine.read_metrics()).version})

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
            Route("/sleep", after(getattr(engine, "sleep", cannot)), methods=["POST"]),
            Route("/wake_up", after(getattr(engine, "wake_up", cannot)), methods=["POST"]),
            Route("/state", state, methods=["GET"]),
            Route("/pause", after(lambda: engine.pause(mode="keep")), methods=["POST"]),
            Route("/resume", after(engine.resume), methods=["POST"]),
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
