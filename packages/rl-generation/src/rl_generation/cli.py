"""`rl-generation`, also `python -m rl_generation`: engines from the command line.

Each command is a module of `rl_generation.commands` with `add_arguments(parser)` and `run(arguments) -> int`, imported
when it is chosen and not before. Exit codes: 0 it holds, 1 it does not (the engine or its answers failed), 2 refused or
misused; the reasons are printed. An interrupt or a termination signal ends with 130.
"""

import argparse
import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

from rl_generation.commands import CommandError, say
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
)

PROGRAM = "rl-generation"
COMMANDS = {
    "generate": "answer the prompts of a JSON Lines file; an interrupted run can be resumed",
    "serve": "serve a model over HTTP, as OpenAI's clients ask",
    "explain": "say what an engine would do with a model, without loading its weights",
    "bench": "measure the tokens a second of several engines, side by side",
}
REFUSALS = (CommandError, EngineOptionError, ModelError, PromptError)
FAILURES = (EngineDeadError, LogpError, SampleTimeoutError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(given[:1]).command
    command = import_module(f"rl_generation.commands.{chosen}")
    summary = COMMANDS[chosen]
    parser = _CommandParser(
        prog=f"{PROGRAM} {chosen}", description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    command.add_arguments(parser)
    arguments = parser.parse_args(given[1:])
    try:
        with _ending_by_signal():
            code: int = command.run(arguments)
        sys.stdout.flush()
    except (*REFUSALS, *FAILURES) as error:
        say(f"{PROGRAM} {chosen}: {error}")
        return 1 if isinstance(error, FAILURES) else 2
    except KeyboardInterrupt:
        say(f"{PROGRAM} {chosen}: interrupted")
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
        return 0
    return code


class _CommandParser(argparse.ArgumentParser):
    """Says which flag an unknown one may have meant."""

    def error(self, message: str) -> NoReturn:
        for word in message.split() if "unrecognized arguments" in message else ():
            flag = word.partition("=")[0]
            if flag.startswith("--") and (near := difflib.get_close_matches(flag, self._option_string_actions, n=1)):
                message += f"; for {flag} did you mean {near[0]}?"
        super().error(message)


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Have a termination signal end the command as an interrupt does: engines close, and their processes with them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="Generate with language models, and know what was sampled.",
        epilog=f"commands:\n{listed}\n\n{PROGRAM} COMMAND --help lists what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="one of the commands below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
