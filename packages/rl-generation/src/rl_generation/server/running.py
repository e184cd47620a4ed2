"""Runs the application: in a thread beside its caller, or as what the process does. Knows uvicorn and sockets.

Loopback by default. Another address needs an API key: whoever reaches the port may use the engine.
"""

import os
import socket
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, final

import uvicorn
from starlette.types import ASGIApp

from rl_generation.engine import StreamingEngine
from rl_generation.errors import EngineOptionError
from rl_generation.server.app import create_app
from rl_generation.server.guard import check_api_key, is_loopback
from rl_generation.server.limits import ServerLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["API_KEY_VARIABLE", "Server", "check_address", "serve"]

API_KEY_VARIABLE = "RL_GENERATION_API_KEY"
"""Where `serve` and `Server` look for the API key that they were not given."""


class HttpThread:
    """An application that is served in a thread of its own, for as long as a `with` block.

    Args:
        app: What is served.
        host: Address to listen on.
        port: To listen on; 0 takes a free one, which `port` then says.
        shutdown_timeout_s: Whole seconds for requests in flight at the end.
        log_level: Of uvicorn's loggers; it never logs headers.
    """

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


def serve(streaming_engine: StreamingEngine, **options: Any) -> None:
    """Serve until an interrupt or a termination signal; the options are those of `Server`.

    Raises:
        EngineOptionError: `host` is not loopback and there is no API key.
        OSError: The address is taken, or not this machine's.
    """
    Server(streaming_engine, **options).run()
