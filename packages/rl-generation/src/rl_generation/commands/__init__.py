"""The commands of `rl-generation`, one module each, and what they share: results go to stdout, all else to stderr."""

import json
import sys
from typing import Any


class CommandError(ValueError):
    """The operation failed or cannot be continued."""


def say(line: str) -> None:
    """Tell the person in front of the screen; not part of the result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Write a result for people."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show_json(figures: dict[str, Any]) -> None:
    """Write the last line of a command that measures or judges: every figure."""
    show(json.dumps(figures))
