"""The processes of an engine: which they are, which of them died and how, and what killed ones leave behind.

They leave shared memory, semaphores, and the folder of the engine's sockets. `EngineProcesses.end` removes what
Python's tracker would keep until this program ends. Where this program itself is killed, a small process ends the
others and removes it, and where that is killed, too, the next engine on the machine: each engine has an `EngineFolder`,
which is locked while its program lives, and lists the shared memory of its processes.

Linux only. Run as a program, this file is that small process, so it imports Python's own modules alone.
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
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the system has them)
KINDS = {"psm_": "shared_memory", "sem.mp-": "semaphore"}
"""How Python names a file → what its tracker calls it."""

VLLM = "vllm_dist_"
"""What vLLM's ranks on a CPU call their shared memory."""

FOLDER, OWNER, LIST = "rl-vllm-", "owner", "shared_memory"

KILL_TIMEOUT_S = 30.0
"""How long a process that was killed may take to end; only one that waits in the kernel takes that long."""


class ProcessStat(NamedTuple):
    """What /proc knows of a living process."""

    parent: int
    started: int
    """In clock ticks since the machine started."""

    state: str
    """"T" or "t" where a signal (SIGSTOP) or a debugger has stopped it."""


def process_stat(pid: int) -> ProcessStat | None:
    """Return what is known of a process; None if there is none, or a zombie."""
    try:
        row = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if row[0] in "ZX" else ProcessStat(parent=int(row[1]), started=int(row[19]), state=row[0])


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process of this node; the start time tells it from a later process with the same pid."""

    pid: int
    started: int | None
    """In clock ticks since the machine started; None if it had ended already."""

    @classmethod
    def of(cls, pid: int) -> "ChildProcess":
        """Return the process that has this pid now."""
        stat = process_stat(pid)
        return cls(pid, None if stat is None else stat.started)

    def alive(self) -> bool:
        """Whether it is still running."""
        stat = process_stat(self.pid)
        return stat is not None and stat.started == self.started

    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger has stopped it."""
        stat = process_stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state in "Tt"

    def kill(self) -> None:
        """Kill it, if its pid is still its own."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, signal.SIGKILL)


class EngineProcesses:
    """All processes under `roots`, and the shared memory that is theirs alone.

    Args:
        roots: `multiprocessing.Process` objects that the engine started.

    Attributes:
        started: By process id, all that were found, living or not.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.roots = tuple(roots)
        self.started: dict[int, ChildProcess] = {}
        self._files: dict[int, Path] = {}
        self.survey()
        # Of Python's naming, only what they have now: later, a worker may have mapped what is a trainer's.
        theirs = mapped_shared_memory(*self.started) - mapped_shared_memory(os.getpid())
        self._files |= _files(theirs, prefixes=tuple(KINDS))
        # What vLLM has titled as one; compilers and trackers come and go.
        self._workers = {number: title for number in self.started if "Worker" in (title := _title(number))}

    def survey(self) -> None:
        """Look for further processes, and shared memory of vLLM's naming."""
        self.started |= _below({root.pid for root in self.roots})
        self._files |= _files(mapped_shared_memory(*self.started), prefixes=(VLLM,))

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
            if not self.started[process_id].alive():
                return f"{title} (process {process_id}) of the engine is dead; vLLM's log may say of what"
        return None

    def end(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all have ended, kill those that have not, and remove what they left in shared memory."""
        _wait(self.started.values(), timeout_s)
        for process in self.started.values():
            process.kill()
        # A worker is no child of this process, and on a busy machine one that was killed needs a while to end.
        _wait(self.started.values(), KILL_TIMEOUT_S)
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


def _wait(processes: Iterable[ChildProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def _below(roots: set[int]) -> dict[int, ChildProcess]:
    """By process id, `roots` and all of their descendants that live."""
    stats = {int(each.name): process_stat(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()}
    found: dict[int, ChildProcess] = {}
    newest = roots
    while newest:
        found |= {pid: ChildProcess(pid, stat.started) for pid in newest if (stat := stats.get(pid)) is not None}
        newest = {process_id for process_id, stat in stats.items() if stat and stat.parent in newest} - found.keys()
    return found


def _title(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8").partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# -- Where this program is killed -------------------------------------------------------------------------------------


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

    def watch(self, started: Mapping[int, ChildProcess]) -> None:
        """List the shared memory that this process and these have mapped now, and keep them.

        vLLM's processes would outlive a program that is killed, so that a process of its own looks twice a second
        whether this one lives. Once it does not, it kills the others and removes what is listed, and the folder.
        """
        files = _files(mapped_shared_memory(*started, os.getpid()))
        text = "".join(f"{number} {file.name}\n" for number, file in files.items())
        (self.path / LIST).write_text(text, encoding="utf-8")
        task = json.dumps([os.getpid(), str(self.path), [[each.pid, each.started] for each in started.values()]])
        quiet = subprocess.DEVNULL
        self._keeper = subprocess.Popen(  # noqa: S603 - this Python, and this file
            [sys.executable, "-I", "-S", __file__, task],
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


def keep(parent: int, folder: str, started: Iterable[tuple[int, int]]) -> None:
    """Wait until process `parent` is gone; then kill these, and remove the folder and the shared memory listed there.

    An engine that ends in order kills whoever waits here.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    processes = [ChildProcess(*each) for each in started]
    for process in processes:
        process.kill()
    _wait(processes, KILL_TIMEOUT_S)
    for file in _listed(Path(folder), _files(None)):
        file.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _listed(folder: Path, there: Mapping[int, Path]) -> list[Path]:
    """Of the files that are there, by inode, those that the folder of an engine lists."""
    text = (folder / LIST).read_text(encoding="utf-8") if (folder / LIST).exists() else ""
    named = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return [file for number, file in there.items() if named.get(str(number)) == file.name]


def abandoned(parent: Path | None = None) -> dict[Path, list[Path]]:
    """Folders of engines whose program was killed, in `parent` or where temporary files go, and their shared memory.

    Of the files that a folder lists, those that are there, are the same, and are mapped by no process of this machine.
    """
    found: dict[Path, list[Path]] = {}
    for owner in (parent or Path(tempfile.gettempdir())).glob(f"{FOLDER}*/{OWNER}"):
        with contextlib.suppress(OSError), owner.open("r+") as file:  # another user's, or locked by its living owner
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found[owner.parent] = _listed(owner.parent, unmapped())
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
    there = _files(None)
    mapped = mapped_shared_memory(*(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()))
    mine: dict[int, Path] = {}
    for number, file in there.items():
        with contextlib.suppress(OSError):  # it is gone by now
            if number not in mapped and file.stat().st_uid == os.getuid():
                mine[number] = file
    return mine


def mapped_shared_memory(*process_ids: int) -> set[int]:
    """Inodes of the files in shared memory that these processes have mapped; of one that has ended, none.

    A semaphore is mapped under another name than its file has.
    """
    mapped = set()
    for process_id in process_ids:
        with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
            lines = Path(f"/proc/{process_id}/maps").read_text(encoding="utf-8").splitlines()
            mapped |= {int(line.split(maxsplit=5)[4]) for line in lines if f"{SHARED_MEMORY}/" in line}
    return mapped


def _files(numbers: Collection[int] | None, *, prefixes: tuple[str, ...] = (*KINDS, VLLM)) -> dict[int, Path]:
    """Inode → file of those that Python or vLLM made, or whoever names files so; None for whatever inode."""
    found = {}
    for entry in os.scandir(SHARED_MEMORY):
        if entry.name.startswith(prefixes) and (numbers is None or entry.inode() in numbers):
            found[entry.inode()] = Path(entry.path)
    return found


if __name__ == "__main__":
    keep(*json.loads(sys.argv[1]))
