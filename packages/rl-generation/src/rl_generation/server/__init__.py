"""An OpenAI-compatible HTTP server: vLLM's own app over its engine, a subset of that over any other that streams.

The one package here that needs more: `pip install "rl-generation[server]"`. The engine stays its caller's: a server
that ends leaves it running.
"""

from importlib.util import find_spec

_missing = [name for name in ("pydantic", "starlette", "uvicorn") if find_spec(name) is None]
if _missing:
    raise ImportError(f"rl_generation.server needs {' and '.join(_missing)}: pip install 'rl-generation[server]'")

from rl_generation.server.app import (  # noqa: E402
    API_KEY_VARIABLE,
    ControlServer,
    Server,
    create_app,
    read_token,
)
from rl_generation.server.guard import ServerLimits  # noqa: E402

__all__ = ["API_KEY_VARIABLE", "ControlServer", "Server", "ServerLimits", "create_app", "read_token"]
