"""Refits from the command line, before anything moves: `python docs/tools/refit_tools.py explain …` and `simulate …`.

Each command lives beside what it commands, in a module with `add_arguments(parser)` and `run(arguments) -> int`, which
is imported when the command is chosen and not before. Exit codes: 0 it holds, 1 it does not (the reasons are printed),
2 refused or misused (likewise).
"""

# ruff: noqa: INP001, T201  (a program)

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from rl_refit import CoverageError, RefitError

__all__ = ["main"]

INTERRUPTED = 130
COMMANDS = {
    "explain": ("refit_explainer.command", "what a refit would move, from whom to whom, and what nobody feeds"),
    "simulate": ("refit_simulator.command", "predict a refit on many GPUs, beside what physics allows"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="refit_tools.py", description="Weights into a running engine: what will move, how long it will take."
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    run: Callable[[argparse.Namespace], int] | None = None
    for name, (module, summary) in COMMANDS.items():
        its_parser = parsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if given[:1] == [name]:
            command = import_module(module)
            command.add_arguments(its_parser)
            run = command.run
    arguments = parser.parse_args(given)
    chosen = arguments.command
    if run is None:
        parser.error("the command comes first")
    try:
        code = run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
        return 0
    except (RefitError, ValueError, OSError) as refusal:
        print(f"{chosen}: {refusal}", file=sys.stderr)
        return 1 if isinstance(refusal, CoverageError) else 2
    except KeyboardInterrupt:
        print(f"{chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
