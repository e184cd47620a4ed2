"""Console output shared by all commands: results on stdout, everything else on stderr."""

import json
import sys
from typing import Any, final


@final
class CommandError(ValueError):
    """What a command was asked to do cannot be done."""


def say(line: str) -> None:
    """Tell the person in front of the screen; not part of the result."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Write a result for people."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def show_json(figures: dict[str, Any]) -> None:
    """Write a result for programs: one line, without NaN or infinity."""
    sys.stdout.write(f"{json.dumps(figures, allow_nan=False)}\n")
    sys.stdout.flush()
