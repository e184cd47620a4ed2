"""`rl-backends`, also `python -m rl_backends`: the backend from the command line.

Each command is a module of `rl_backends.commands` with `add_arguments(parser, given)`, whose flags may depend on the
command line `given`, and `run(arguments)`, which tells people and returns the figures for `--json`, among them whether
it "holds"; it is imported when it is chosen and not before.
Exit codes: 0 it holds, 1 it does not, 2 refused or misused; the reasons are printed.
"""

import argparse
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn, final

from rl_backends.errors import MissingDependencyError

PROGRAM = "rl-backends"
COMMANDS = {
    "explain": "say what the backend would do with a model on so many ranks, and what memory that takes",
    "verify": "compare the backend on real ranks with plain transformers and AdamW, on a small model of the same kind",
    "convert": "write a Hugging Face model as a checkpoint of Megatron-LM; training does not need it",
    "export": "make a Hugging Face folder of a checkpoint or of a conversion",
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    listed = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    first = _CommandParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="Train language models over a mesh, and know beforehand what it takes.",
        epilog=f"commands:\n{listed}\n\n{PROGRAM} COMMAND --help lists what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    first.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="one of the commands below")
    chosen = first.parse_args(given[:1]).command
    summary = COMMANDS[chosen]
    command = import_module(f"rl_backends.commands.{chosen}")
    parser = _CommandParser(
        prog=f"{PROGRAM} {chosen}", description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    command.add_arguments(parser, given[1:])
    arguments = parser.parse_args(given[1:])
    started = time.monotonic()
    try:
        figures: dict[str, Any] = command.run(arguments)
        if arguments.json:
            print(json.dumps({"seconds": round(time.monotonic() - started, 3), **figures}, allow_nan=False))
        sys.stdout.flush()
    except (ValueError, MissingDependencyError) as refusal:  # of ours, and of what ours builds on: PlanError too
        print(f"{PROGRAM} {chosen}: {refusal}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as failure:
        if isinstance(failure, BrokenPipeError):  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
            return 0
        print(f"{PROGRAM} {chosen}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROGRAM} {chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0 if figures["holds"] else 1


@final
class _CommandParser(argparse.ArgumentParser):
    """Says which flag, or which of its words, an unknown one may have meant."""

    def error(self, message: str) -> NoReturn:
        hints = ""
        if unknown := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):  # as argparse says it
            for near in difflib.get_close_matches(unknown[1], re.findall(r"[\w-]+", unknown[2]), n=1):
                hints = f"; did you mean {near!r}?"
        for word in message.split() if "unrecognized arguments" in message else ():  # as argparse says it
            flag = word.partition("=")[0]
            if flag.startswith("--") and (near := difflib.get_close_matches(flag, self._option_string_actions, n=1)):
                hints += f"; for {flag} did you mean {near[0]}?"
        super().error(message + hints)


if __name__ == "__main__":
    sys.exit(main())
