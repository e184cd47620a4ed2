"""The control port: stops and continues a served engine, and says which weights it has. Never on the public port.

    GET /state   POST /pause   POST /resume   POST /sleep   POST /wake_up

An engine that sleeps has freed its device's memory and keeps the weights in the host's; vLLM's can. Each answers
`{"paused": …, "weight_version": …}`. Whoever may call it can stop the engine for all of its clients, so it asks for a
token of its own, even on this machine. Weights do not come in here, and neither does their version: the refit that
writes them commits it. Whoever arranges refits may add routes of their own behind the same token.
"""

import asyncio
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_generation.engine import StreamingEngine
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.server.app import error_handlers
from rl_generation.server.errors import HttpError
from rl_generation.server.guard import Guard, check_api_key
from rl_generation.server.limits import ServerLimits
from rl_generation.server.running import HttpThread

__all__ = ["ControlServer", "read_token"]


@final
class ControlServer(HttpThread):
    """Serves the control port of an engine in a thread of its own, for as long as a `with` block.

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
