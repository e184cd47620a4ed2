"""Shared memory and semaphores of processes that were killed: Python's tracker keeps them until this program ends.

Linux only.
"""

import os
from collections.abc import Collection, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import final

__all__ = ["SHARED_MEMORY", "Leftovers", "mapped_shared_memory"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the system has them)
KINDS = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
"""How Python names a file → what its tracker calls it."""


@final
class Leftovers:
    """What `process_ids` have mapped now, and this process has not, so that it is theirs alone."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        theirs = {number for process_id in process_ids for number in mapped_shared_memory(process_id)}
        self._files = _files(theirs - mapped_shared_memory(os.getpid()).keys())

    def remove(self) -> None:
        """Remove what is still there, once those processes are gone, and have the tracker forget it."""
        still = _files(self._files.keys())
        for number, file in self._files.items():
            if still.get(number) != file:
                continue
            file.unlink(missing_ok=True)
            kind = next(kind for prefix, kind in KINDS.items() if file.name.startswith(prefix))
            resource_tracker.unregister(f"/{file.name.removeprefix('sem.')}", kind)


def mapped_shared_memory(process_id: int) -> dict[int, Path]:
    """Inode → path of the files in shared memory that a process has mapped; empty where there is no such process.

    A semaphore is mapped under another name than its file has.
    """
    try:
        lines = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return {}
    columns = [line.split(maxsplit=5) for line in lines if f"{SHARED_MEMORY}/" in line]
    return {int(each[4]): Path(each[5]) for each in columns}


def _files(numbers: Collection[int]) -> dict[int, Path]:
    """Inode → file, of those that Python made."""
    found = {}
    for entry in os.scandir(SHARED_MEMORY):
        if entry.name.startswith(tuple(KINDS)) and entry.inode() in numbers:
            found[entry.inode()] = Path(entry.path)
    return found
