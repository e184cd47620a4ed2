"""`rl-parallel-plans`, also `python -m rl_parallel_plans`: plans from the command line.

Each command is a module with `add_arguments(parser)` and `run(arguments) -> int`, which is imported only when the
command is chosen. Exit codes: 0 it holds, 1 it does not, 2 refused or misused; the reasons are printed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from rl_parallel_plans.errors import PlanError

PROGRAM = "rl-parallel-plans"
INTERRUPTED = 130
COMMANDS = {
    "explain": ("rl_parallel_plans.explain.command", "which rule shards which parameter, what a rank holds and sends"),
    "verify": (
        "rl_parallel_plans.verification.api",
        "compare a sharded model with a whole one, on real processes",
    ),
    "memory": ("rl_parallel_plans.forecast.command", "predict the peak memory of a training step on each rank"),
    "parity": ("rl_parallel_plans.verification.parity", "verify every architecture and write the table"),
    "classes": ("rl_parallel_plans.verification.classes", "verify every class of transformers and write the table"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    chosen = _parser().parse_args(given[:1]).command
    module, summary = COMMANDS[chosen]
    command = import_module(module)
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {chosen}", description=f"{summary[0].upper()}{summary[1:]}.")
    command.add_arguments(parser)
    arguments = parser.parse_args(given[1:])
    try:
        code: int = command.run(arguments)
        sys.stdout.flush()
    except PlanError as refusal:
        print(f"{PROGRAM} {chosen}: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM} {chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when the interpreter ends
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10}{summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description="Shard a model over ranks by a plan that can be read, checked and refused.",
        epilog=f"commands:\n{listed}\n\n{PROGRAM} COMMAND --help lists what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND", help="one of the commands below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
