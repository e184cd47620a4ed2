"""`rl-generation`, also `python -m rl_generation`: engines from the command line.

Each command is a dataclass of `rl_generation.commands` whose fields are its flags, with `run() -> int`. Exit codes: 0
it holds, 1 it does not (the engine or its answers failed), 2 refused or misused; the reasons are printed. An interrupt
or a termination signal ends with 130.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union

import tyro

from rl_generation.commands import CommandError, say
from rl_generation.commands.bench import Bench
from rl_generation.commands.explain import Explain
from rl_generation.commands.generate import Generate
from rl_generation.commands.serve import Serve
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
)

PROGRAM = "rl-generation"
COMMANDS: dict[str, Any] = {each.__name__.lower(): each for each in (Generate, Serve, Explain, Bench)}
REFUSALS = (CommandError, EngineOptionError, ModelError, PromptError)
FAILURES = (EngineDeadError, LogpError, SampleTimeoutError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = given[0] if given else ""
    if chosen not in COMMANDS:
        about = "Generate with language models, and know what was sampled."
        every: Any = Union[*COMMANDS.values()]
        tyro.cli(every, prog=PROGRAM, description=about, args=given)  # helps or refuses, and ends
    name = f"{PROGRAM} {chosen}"
    how = (tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
    try:
        with _ending_by_signal():
            code: int = tyro.cli(COMMANDS[chosen], prog=name, args=given[1:], config=how).run()
        sys.stdout.flush()
    except (*REFUSALS, *FAILURES) as error:
        say(f"{name}: {error}")
        return 1 if isinstance(error, FAILURES) else 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
        return 0
    return code


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


if __name__ == "__main__":
    sys.exit(main())
