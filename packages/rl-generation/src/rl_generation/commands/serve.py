"""`rl-generation serve`: any engine behind the HTTP server, until an interrupt.

Writes one line to stdout once it listens: its URL. Exit codes: 0 it was ended, 1 the engine failed, 2 refused.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rl_generation.commands import CommandError, say, show
from rl_generation.commands.flags import add_engine_arguments, spec_of, start_engine
from rl_generation.engine import StreamingEngine
from rl_generation.loading import check_available


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address; other than loopback needs an API key")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    group.add_argument("--api-key-env", metavar="NAME", help="environment variable with the API key")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model (default: MODEL)")
    group.add_argument(
        "--tool-format",
        metavar="NAME",
        help="how the model writes calls of tools: hermes, llama, mistral, or, with vLLM, any of its parsers (default: "
        "as the chat template or vocabulary says)",
    )
    group.add_argument(
        "--control-port", type=int, metavar="N", help="loopback port that pauses and resumes; 0: a free one"
    )
    group.add_argument("--control-token-env", metavar="NAME", help="environment variable with the control port's token")
    group.add_argument("--control-token-file", metavar="PATH", help="file with the token, which only you may read")


def run(arguments: argparse.Namespace) -> int:
    """Serve until an interrupt, and return the exit code."""
    try:
        from rl_generation.server import ControlServer, Server, read_token
        from rl_generation.server.app import check_address
    except ImportError as error:
        raise CommandError(str(error)) from None
    spec = spec_of(arguments)
    if not spec.with_tokenizer:
        raise CommandError("a server of texts needs a tokenizer: leave out --no-tokenizer")
    variable, api_key, token = arguments.api_key_env, None, None
    if variable is not None and not (api_key := os.environ.get(variable)):
        raise CommandError(f"--api-key-env {variable}: the environment variable {variable} is not set, or empty")
    try:
        if arguments.control_port is not None:
            token = read_token(variable=arguments.control_token_env, file=arguments.control_token_file)
        elif arguments.control_token_env is not None or arguments.control_token_file is not None:
            raise CommandError("a token of the control port was named, and no --control-port")
    except ValueError as error:
        raise CommandError(str(error)) from None
    check_available(spec)
    with _refusing(f"cannot serve at {arguments.host}:{arguments.port}"):  # before the engine, which takes long to load
        check_address(arguments.host, arguments.port, api_key=api_key)
    with ExitStack() as stack:
        engine, tokenizer = start_engine(spec)
        stack.callback(engine.close)  # with all of its processes
        assert isinstance(engine, StreamingEngine), f"{type(engine).__name__} does not stream"
        with _refusing(f"cannot serve at {arguments.host}:{arguments.port}"):
            server = Server(
                engine,
                tokenizer=tokenizer,
                model_name=arguments.served_model_name or spec.model,
                tool_format=arguments.tool_format,
                host=arguments.host,
                port=arguments.port,
                api_key=api_key,
            )
        say(engine.explain())
        if token is not None:
            with _refusing("cannot serve the control port"):
                at = stack.enter_context(ControlServer(engine, token=token, port=arguments.control_port))
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
