"""The processes of an engine: which they are, which of them died and how, and what killed ones leave behind.

They leave shared memory, semaphores, and the folder of the engine's sockets. `EngineProcesses.end` removes what
Python's tracker would keep until this program ends. Where this program itself is killed, a small process ends the
others and removes it, and where that is killed, too, the next engine on the machine: each engine has an `EngineFolder`,
which is locked while its program lives, and lists the shared memory of its processes.

Linux only.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, final

from rl_generation.child_process import process_stat

__all__ = [
    "SHARED_MEMORY",
    "EngineFolder",
    "EngineProcesses",
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

KILL_TIMEOUT_S = 30.0
"""How long a process that was killed may take to end; only one that waits in the kernel takes that long."""


@final
class EngineProcesses:
    """All processes under `roots`, and the shared memory that is theirs alone.

    Args:
        roots: `multiprocessing.Process` objects that the engine started.

    Attributes:
        started: Process id → start of all that were found, living or not.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.roots = tuple(roots)
        self.started: dict[int, int] = {}
        self._files: dict[int, Path] = {}
        self.survey()
        # Of Python's naming, only what they have now: later, a worker may have mapped what is a trainer's.
        theirs = {number for process_id in self.started for number in mapped_shared_memory(process_id)}
        self._files |= _files(theirs - mapped_shared_memory(os.getpid()).keys(), prefixes=tuple(KINDS))
        # What vLLM has titled as one; compilers and trackers come and go.
        self._workers = {number: title for number in self.started if "Worker" in (title := _title(number))}

    def survey(self) -> None:
        """Look for further processes, and shared memory of vLLM's naming."""
        self.started |= _below({root.pid for root in self.roots})
        mapped = {number for process_id in self.started for number in mapped_shared_memory(process_id)}
        self._files |= _files(mapped, prefixes=(VLLM,))

    def dead(self) -> str | None:
        """Say which root or worker is dead, and how it ended where that is known; None where all live."""
        for root in self.roots:
            if not root.is_alive():
                code = root.exitcode
                how = "how it ended is unknown" if code is None else f"it exited with code {code}"
                if code is not None and code < 0:
                    how = f"killed by {signal.Signals(-code).name}"
                return f"{root.name} (process {root.pid}) of the engine is dead: {how}"
        for process_id, title in self._workers.items():  # how a worker ended is known to its parent alone
            if not self._lives(process_id):
                return f"{title} (process {process_id}) of the engine is dead; vLLM's log may say of what"
        return None

    def end(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all have ended, kill those that have not, and remove what they left in shared memory."""
        self._wait(timeout_s)
        for process_id in filter(self._lives, self.started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        # A worker is no child of this process, and on a busy machine one that was killed needs a while to end.
        self._wait(KILL_TIMEOUT_S)
        for root in self.roots:
            root.join(timeout_s)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove shared memory of theirs that is still there, and have Python's tracker forget it."""
        still = _files(self._files.keys())
        for number, file in self._files.items():
            if still.get(number) == file:
                file.unlink(missing_ok=True)
                for prefix, kind in KINDS.items():
                    if file.name.startswith(prefix):
                        resource_tracker.unregister(f"/{file.name.removeprefix('sem.')}", kind)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(map(self._lives, self.started)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _lives(self, process_id: int) -> bool:
        stat = process_stat(process_id)
        return stat is not None and stat.started == self.started[process_id]


def _below(roots: set[int]) -> dict[int, int]:
    """Process id → start of `roots` and all of their descendants that live."""
    stats = {int(each.name): process_stat(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()}
    found: dict[int, int] = {}
    newest = roots
    while newest:
        found |= {process_id: stat.started for process_id in newest if (stat := stats.get(process_id)) is not None}
        newest = {process_id for process_id, stat in stats.items() if stat and stat.parent in newest} - found.keys()
    return found


def _title(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8").partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# -- Where this program is killed -------------------------------------------------------------------------------------

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
class EngineFolder:
    """The folder of an engine's sockets, and of what its processes leave in a folder for temporary files.

    Attributes:
        path: Short, since the names of sockets may have 107 bytes.
    """

    def __init__(self) -> None:
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=FOLDER))
        self._keeper: subprocess.Popen[bytes] | None = None
        # Locked before it gets its name: an unlocked file of that name means that the owner is gone.
        unlocked = self.path / f"{OWNER}.new"
        self._lock = unlocked.open("w")
        with contextlib.suppress(OSError):  # a file system without locks: it is never taken for abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.path / OWNER)

    def watch(self, started: Mapping[int, int]) -> None:
        """List the shared memory that this process and these (process id → start) have mapped now, and keep them.

        vLLM's processes would outlive a program that is killed, so that a process of its own looks twice a second
        whether this one lives. Once it does not, it kills the others and removes what is listed, and the folder.
        """
        mapped = {number for process_id in (*started, os.getpid()) for number in mapped_shared_memory(process_id)}
        text = "".join(f"{number} {file.name}\n" for number, file in _files(mapped).items())
        (self.path / LIST).write_text(text, encoding="utf-8")
        task = json.dumps([os.getpid(), str(self.path), [*started.items()]])
        quiet = subprocess.DEVNULL
        self._keeper = subprocess.Popen(  # noqa: S603 - this Python, and the program above
            [sys.executable, "-I", "-S", "-c", KEEPER, task],
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )

    def remove(self) -> None:
        """Remove it: the engine has ended in order. A second time does nothing."""
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


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
    mapped: set[int] = set()
    there = _files(None)
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            mapped |= mapped_shared_memory(int(each.name)).keys()
    mine: dict[int, Path] = {}
    for number, file in there.items():
        with contextlib.suppress(OSError):  # it is gone by now
            if number not in mapped and file.stat().st_uid == os.getuid():
                mine[number] = file
    return mine


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


def _files(numbers: Collection[int] | None, *, prefixes: tuple[str, ...] = (*KINDS, VLLM)) -> dict[int, Path]:
    """Inode → file of those that Python or vLLM made, or whoever names files so; None for whatever inode."""
    found = {}
    for entry in os.scandir(SHARED_MEMORY):
        if entry.name.startswith(prefixes) and (numbers is None or entry.inode() in numbers):
            found[entry.inode()] = Path(entry.path)
    return found
