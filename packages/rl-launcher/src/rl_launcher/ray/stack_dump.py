"""The Python stacks of processes that do not answer.

A process that hangs runs none of our code, but a signal still makes its interpreter write the stacks of all threads
into its log (`ActorHost` registers that), from which they are read here.
"""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_launcher.ray.worker_failures import ProcessInfo

MAX_PROCESSES = 64
"""Processes whose stacks are collected, each by a task on its node; `describe_stacks` counts the others."""

MAX_CALLS = 8
"""Calls of each stack that are shown, from the innermost."""

POLL_S = 0.1

NO_STACK = "wrote no stack in time: it is stopped, or its log cannot be read from this node"

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)


def collect_stacks(late: Sequence[tuple[ProcessInfo, Callable[[], None]]], *, timeout_s: float) -> list[str]:
    """Have the first `MAX_PROCESSES` write their stacks, and read these from their logs.

    Args:
        late: processes that have not answered, each with a function that has it write its stacks.
        timeout_s: for all of them together.

    Returns:
        The innermost calls of each process's main thread; empty if it wrote none, or its log cannot be read from here.
    """
    late = late[:MAX_PROCESSES]
    logs = [Path(who.log) for who, _ in late]
    sizes = [log.stat().st_size if log.is_file() else 0 for log in logs]
    for _, write_stacks in late:
        write_stacks()
    until = time.monotonic() + timeout_s
    written = [""] * len(late)
    while time.monotonic() < until:
        time.sleep(POLL_S)
        now = [_read_from(who, size) for (who, _), size in zip(late, sizes, strict=True)]
        if now == written and all(map(innermost_calls, now)):
            break  # all have written, and none is still writing
        written = now
    return [innermost_calls(text) for text in written]


def innermost_calls(text: str) -> str:
    """The innermost calls of the main thread, which `faulthandler` writes after all other threads."""
    threads = [*_THREAD.finditer(text)]
    if not threads:
        return ""
    lines = text[threads[-1].end() :].splitlines()
    return "\n".join([line.strip() for line in lines if line.startswith("  File ")][:MAX_CALLS])


_COLLECTIVE = re.compile(
    r"torch/distributed/|process_group|_functional_collectives|megatron/core/.*(reduce|gather|p2p)"
)


def find_awaited(stacks: Sequence[str]) -> list[int]:
    """Which processes the others wait for: those that stand still, or else those that are in no collective.

    Args:
        stacks: the innermost calls of each process that has not answered, as `collect_stacks` returns them.

    Returns:
        Their places. All of them if every process waits in a collective; empty if none does, so that they may all be
        computing.
    """
    if stopped := [place for place, stack in enumerate(stacks) if not stack]:
        return stopped
    inside = [bool(_COLLECTIVE.search(stack)) for stack in stacks]
    if not any(inside):
        return []
    return [place for place, waits in enumerate(inside) if not waits] or [*range(len(stacks))]


def describe_stacks(late: Sequence[ProcessInfo], stacks: Sequence[str]) -> str:
    """Where each process of `late` hangs, those at the same place together; empty if there is no stack."""
    if not any(stacks):
        return ""
    places: dict[str, list[ProcessInfo]] = {}
    for who, stack in zip(late, stacks, strict=False):
        places.setdefault(stack, []).append(who)
    lines = ["Where they hang, innermost call first:"]
    for stack, there in places.items():
        lines.append(f"  {', '.join(map(str, there))}:")
        lines += [f"    {line}" for line in (stack or NO_STACK).splitlines()]
    if len(late) > len(stacks):
        lines.append(f"  {len(late) - len(stacks)} more have not answered; their stacks were not collected")
    return "\n".join(lines)


def _read_from(who: ProcessInfo, start: int) -> str:
    try:
        with Path(who.log).open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""
