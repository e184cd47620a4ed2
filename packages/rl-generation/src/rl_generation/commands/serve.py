"""`rl-generation serve`: any engine behind the HTTP server, until an interrupt.

Writes one line to stdout once it listens: its URL. Exit codes: 0 it was ended, 1 the engine failed, 2 refused.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rl_generation.commands import CommandError, say, show
from rl_generation.commands.flags import EngineFlags, start_engine
from rl_generation.engine import StreamingEngine
from rl_generation.loading import check_available


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, as OpenAI's clients ask."""

    engine: EngineFlags

    host: str = "127.0.0.1"
    """Address; other than loopback needs an API key."""

    port: int = 8000
    """0 takes a free one."""

    api_key_env: str | None = None
    """Environment variable with the API key."""

    served_model_name: str | None = None
    """What clients call the model; left out, MODEL."""

    tool_format: str | None = None
    """How the model writes calls of tools: hermes, llama, mistral, or, with vLLM, any of its parsers; left out, as the
    chat template or vocabulary says."""

    control_port: int | None = None
    """Loopback port that pauses and resumes; 0 takes a free one."""

    control_token_env: str | None = None
    """Environment variable with the control port's token."""

    control_token_file: str | None = None
    """File with the token, which only you may read."""

    def run(self) -> int:
        """Serve until an interrupt, and return the exit code."""
        try:
            from rl_generation.server import ControlServer, Server, read_token
            from rl_generation.server.app import check_address
        except ImportError as error:
            raise CommandError(str(error)) from None
        spec = self.engine.spec()
        if not spec.with_tokenizer:
            raise CommandError("a server of texts needs a tokenizer: leave out --no-tokenizer")
        variable, api_key, token = self.api_key_env, None, None
        if variable is not None and not (api_key := os.environ.get(variable)):
            raise CommandError(f"--api-key-env {variable}: the environment variable {variable} is not set, or empty")
        try:
            if self.control_port is not None:
                token = read_token(variable=self.control_token_env, file=self.control_token_file)
            elif self.control_token_env is not None or self.control_token_file is not None:
                raise CommandError("a token of the control port was named, and no --control-port")
        except ValueError as error:
            raise CommandError(str(error)) from None
        check_available(spec)
        with _refusing(f"cannot serve at {self.host}:{self.port}"):  # before the engine, which takes long to load
            check_address(self.host, self.port, api_key=api_key)
        with ExitStack() as stack:
            engine, tokenizer = start_engine(spec)
            stack.callback(engine.close)  # with all of its processes
            assert isinstance(engine, StreamingEngine), f"{type(engine).__name__} does not stream"
            with _refusing(f"cannot serve at {self.host}:{self.port}"):
                server = Server(
                    engine,
                    tokenizer=tokenizer,
                    model_name=self.served_model_name or spec.model,
                    tool_format=self.tool_format,
                    host=self.host,
                    port=self.port,
                    api_key=api_key,
                )
            say(engine.explain())
            if token is not None and self.control_port is not None:
                with _refusing("cannot serve the control port"):
                    at = stack.enter_context(ControlServer(engine, token=token, port=self.control_port))
                say(f"control port: {at.url}")
            show(server.url)
            try:
                server.run()
            except KeyboardInterrupt:
                say("ended")
        return 0


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CommandError(f"{what}: {error}") from None
