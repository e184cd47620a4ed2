"""What processes that were killed leave behind: shared memory, semaphores, and the folder of an engine's sockets.

Of processes that an engine had, `Leftovers` removes what Python's tracker would keep until this program ends. Where
this program itself is killed, a `Keeper` ends the processes and removes it, and where that is killed, too, the next
engine on the machine: each engine has an `EngineFolder`, which is locked while its program lives, and lists the shared
memory of its processes.

Linux only.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import final

__all__ = [
    "SHARED_MEMORY",
    "EngineFolder",
    "Keeper",
    "Leftovers",
    "abandoned",
    "mapped_shared_memory",
    "remove_abandoned",
    "unmapped",
]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the system has them)
KINDS = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
"""How Python names a file → what its tracker calls it."""


VLLM = "vllm_dist_"
"""What vLLM's ranks on a CPU call their shared memory."""
FOLDER, OWNER, LIST = "rl-vllm-", "owner", "shared_memory"


@final
class EngineFolder:
    """The folder of an engine's sockets, and of what its processes leave in a folder for temporary files.

    Attributes:
        path: Short, since the names of sockets may have 107 bytes.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER))
        # Locked before it gets its name: an unlocked file of that name means that the owner is gone.
        unlocked = self.path / f"{OWNER}.new"
        self._lock = unlocked.open("w")
        with contextlib.suppress(OSError):  # a file system without locks: it is never taken for abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.path / OWNER)

    def note(self, process_ids: Iterable[int]) -> None:
        """List the shared memory that these processes, and this one, have mapped now."""
        mapped: dict[int, Path] = {}
        for process_id in (*process_ids, os.getpid()):
            mapped |= mapped_shared_memory(process_id)
        found = _files(mapped.keys(), prefixes=(*KINDS, VLLM))
        text = "".join(f"{number} {file.name}\n" for number, file in found.items())
        (self.path / LIST).write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Remove it; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


KEEPER = """
import json, os, shutil, signal, sys, time

def started(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            after = file.read().rpartition(")")[2].split()
        return None if after[0] == "Z" else int(after[19])
    except OSError:
        return None

parent, folder, processes = json.loads(sys.argv[1])
while os.getppid() == parent:
    time.sleep(0.5)
for process_id, start in processes:
    if started(process_id) == start:
        os.kill(process_id, signal.SIGKILL)
until = time.monotonic() + 30
while any(started(process_id) == start for process_id, start in processes) and time.monotonic() < until:
    time.sleep(0.1)
try:
    lines = open(f"{folder}/shared_memory").read().splitlines()
except OSError:
    lines = []
for line in lines:
    number, _, name = line.partition(" ")
    try:
        if str(os.stat(f"/dev/shm/{name}").st_ino) == number:
            os.unlink(f"/dev/shm/{name}")
    except OSError:
        pass
shutil.rmtree(folder, ignore_errors=True)
"""


@final
class Keeper:
    """A small process that sees to an engine whose program is killed: vLLM's processes would go on without it.

    It looks twice a second whether this process lives. Once it does not, it kills the engine's processes and removes
    what `folder` lists, and the folder.

    Args:
        processes: Process id → start, of the engine.
        folder: Of the engine.
    """

    def __init__(self, processes: Mapping[int, int], folder: EngineFolder) -> None:
        task = json.dumps([os.getpid(), str(folder.path), [*processes.items()]])
        command = [sys.executable, "-I", "-S", "-c", KEEPER, task]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(  # noqa: S603 - this Python, and the program above
            command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def dismiss(self) -> None:
        """End it: the engine is closed in order."""
        self._process.kill()
        self._process.wait()


def abandoned(parent: Path | None = None) -> dict[Path, list[Path]]:
    """Folders of engines whose program was killed, in `parent` or where temporary files go, and their shared memory.

    Of the files that a folder lists, those that are there, are the same, and are mapped by no process of this machine.
    """
    found: dict[Path, list[Path]] = {}
    for owner in (parent or Path(tempfile.gettempdir())).glob(f"{FOLDER}*/{OWNER}"):
        with contextlib.suppress(OSError), owner.open("r+") as file:  # another user's, or locked by its living owner
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listed = owner.with_name(LIST).read_text(encoding="utf-8") if owner.with_name(LIST).exists() else ""
            named = dict(line.split(" ", 1) for line in listed.splitlines() if " " in line)
            free = unmapped()
            found[owner.parent] = [file for number, file in free.items() if named.get(str(number)) == file.name]
    return found


def remove_abandoned(parent: Path | None = None) -> list[Path]:
    """Remove what `abandoned` finds; return the folders."""
    if not SHARED_MEMORY.is_dir():
        return []
    found = abandoned(parent)
    for folder, files in found.items():
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    return [*found]


def unmapped() -> Mapping[int, Path]:
    """Inode → shared memory of Python's or vLLM's naming that belongs to this user and that no process has mapped."""
    mine = _files(None, prefixes=(*KINDS, VLLM))
    mapped: set[int] = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            mapped |= mapped_shared_memory(int(each.name)).keys()
    free = {number: file for number, file in mine.items() if number not in mapped}
    return {number: file for number, file in free.items() if _owner(file) == os.getuid()}


def _owner(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        return file.stat().st_uid
    return None


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


def _files(numbers: Collection[int] | None, *, prefixes: tuple[str, ...] = tuple(KINDS)) -> dict[int, Path]:
    """Inode → file of those that Python made, or whoever names files so; None for whatever inode."""
    found = {}
    for entry in os.scandir(SHARED_MEMORY):
        if entry.name.startswith(prefixes) and (numbers is None or entry.inode() in numbers):
            found[entry.inode()] = Path(entry.path)
    return found
