"""A probe in a process of its own: its answer as data, or why there is none, within a deadline.

It does not know what probes do; `probes` does.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "ask"]

ANSWER = "doctor's answer: "
LONGEST_LINE = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe said."""

    figures: Mapping[str, Any]
    """Empty where it failed."""

    failure: str
    """Empty where it did not: the last line of its error, or that it took too long."""


def ask(probe: str, *words: str, timeout_s: float) -> Answer:
    """Run a probe with all that it starts, and end them all after `timeout_s` seconds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "rl_launcher.doctor.probes", probe, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, to be ended whole
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    answers = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    if code is None:
        return Answer({}, f"no answer in {timeout_s:g} s" + (f"; its last words: {_short(lines[-1])}" if lines else ""))
    if code != 0 or not answers:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Answer({}, _short(_error(lines)) if code > 0 and lines else how)
    return Answer(json.loads(answers[-1]), "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the probe ended all that it started
    process.wait()


def _error(lines: list[str]) -> str:
    """Return the line of a traceback that names the error: the last one, unless remarks follow it."""
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return named[-1] if named else lines[-1]


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"
