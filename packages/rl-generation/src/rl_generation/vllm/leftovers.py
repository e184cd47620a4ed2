"""Shared memory and semaphores of processes that were killed: Python's tracker keeps them until this program ends.

Linux. Knows no engine.
"""

import os
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import final

__all__ = ["Leftovers"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the system has them)
KINDS = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
"""How Python names a file → what its tracker calls it."""


@final
class Leftovers:
    """What `process_ids` have mapped now, and this process has not, so that it is theirs alone."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        theirs = {file for process_id in process_ids for file in _mapped(process_id)}
        self._files = theirs - _mapped(os.getpid())

    def remove(self) -> None:
        """Remove what is still there, once those processes are gone, and have the tracker forget it."""
        for file in self._files:
            prefix, kind = next(each for each in KINDS.items() if file.name.startswith(each[0]))
            if not file.exists():
                continue
            file.unlink(missing_ok=True)
            name = file.name if prefix == "psm_" else file.name.removeprefix("sem.")
            resource_tracker.unregister(f"/{name}", kind)


def _mapped(process_id: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if str(SHARED_MEMORY) in line}
    return {path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(tuple(KINDS))}
