"""Where processes stand that do not answer: the stacks of their main threads. Knows no Ray and no method.

Who hangs runs no code of ours. A signal reaches it all the same, and has its interpreter write the stacks of all
threads into its log (`Host`), which is read here.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_launcher.distributed.failures import Who

__all__ = ["Standing", "describe", "innermost", "where_they_stand"]

MOST = 64
"""Processes that are asked, each by a task on its machine; `describe` counts the others."""

FRAMES = 8
"""Calls of each stack that are shown, from the innermost."""

NO_STACK = "wrote no stack in time: it is stopped, or this machine does not see its log"

PAUSE_S = 0.1

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A process that has not answered."""

    who: Who
    stack: str
    """The innermost calls of its main thread; empty where it wrote none, or this machine does not see its log."""


def where_they_stand(late: Sequence[tuple[Who, Callable[[], None]]], *, timeout_s: float) -> list[Standing]:
    """Ask the first `MOST`, and read what each wrote into its log.

    Args:
        late: who has not answered, and what has its process write its stacks.
        timeout_s: for all of them together.
    """
    asked = late[:MOST]
    before = [_size(who) for who, _ in asked]
    for _, ask in asked:
        ask()
    until = time.monotonic() + timeout_s
    written = [""] * len(asked)
    while time.monotonic() < until:
        time.sleep(PAUSE_S)
        now = [_since(who, size) for (who, _), size in zip(asked, before, strict=True)]
        if now == written and all(map(innermost, now)):
            break  # all have written, and none goes on
        written = now
    return [Standing(who=who, stack=innermost(text)) for (who, _), text in zip(asked, written, strict=True)]


def innermost(text: str) -> str:
    """The innermost calls of the main thread, which `faulthandler` writes last of all threads."""
    threads = [*_THREAD.finditer(text)]
    if not threads:
        return ""
    lines = text[threads[-1].end() :].splitlines()
    return "\n".join([line.strip() for line in lines if line.startswith("  File ")][:FRAMES])


def describe(standing: Sequence[Standing], *, num_late: int) -> str:
    """Who stands where, those at one place together, and how many of `num_late` nobody asked; empty without stacks."""
    places: dict[str, list[Who]] = {}
    for each in standing:
        places.setdefault(each.stack, []).append(each.who)
    if not any(places):
        return ""
    lines = ["Where they stood, innermost call first:"]
    for stack, there in places.items():
        lines.append(f"  {', '.join(map(str, there))}:")
        lines += [f"    {line}" for line in (stack or NO_STACK).splitlines()]
    if num_late > len(standing):
        lines.append(f"  {num_late - len(standing)} more have not answered, and were not asked")
    return "\n".join(lines)


def _size(who: Who) -> int:
    try:
        return Path(who.log).stat().st_size
    except OSError:
        return 0


def _since(who: Who, size: int) -> str:
    try:
        with Path(who.log).open("rb") as file:
            file.seek(size)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
