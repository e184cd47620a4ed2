"""Processes that an engine has started, told from later ones with the same pid. Reads /proc, so this is Linux."""

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What /proc knows of a living process."""

    parent: int
    started: int
    """In clock ticks since the machine started."""


def process_stat(pid: int) -> ProcessStat | None:
    """Return what is known of a process; None if there is none, or a zombie."""
    try:
        row = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if row[0] in "ZX" else ProcessStat(parent=int(row[1]), started=int(row[19]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProcess:
    """A process of this node; the start time tells it from a later process with the same pid."""

    pid: int
    started: int | None
    """In clock ticks since the machine started; None if it had ended already."""

    @classmethod
    def of(cls, pid: int) -> "ChildProcess":
        """Return the process that has this pid now."""
        stat = process_stat(pid)
        return cls(pid=pid, started=None if stat is None else stat.started)

    def alive(self) -> bool:
        """Whether it is still running."""
        stat = process_stat(self.pid)
        return stat is not None and stat.started == self.started

    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger has stopped it."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state in "Tt" and self.alive()

    def kill(self) -> None:
        """Kill it, if its pid is still its own."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, signal.SIGKILL)
