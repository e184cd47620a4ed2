"""What a program holds of the machine it runs on, and what of that it ought to have given back. Linux; reads /proc.

Threads, open files, memory, environment, temporary files, the program's other processes, ports that any of them
listens on, and what they had in shared memory. A process belongs to the program if it inherited `MARK`, whoever its
parent is now. Other programs may come and go meanwhile.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "RL_GENERATION_FOOTPRINT"
"""Environment variable with a value that nothing else has, given to the program by whoever starts it."""
PATIENCE_S = 30.0
SHARED_MEMORY = Path("/dev/shm")
LISTENS = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """At one moment."""

    threads: Mapping[str, int]
    """Name → how many, native ones included."""
    files: Mapping[str, int]
    """Kind, or path, of an open file → how many."""
    processes: tuple[str, ...]
    """Command lines of the others that belong to the program."""
    ports: tuple[str, ...]
    """That one of the program's processes listens on."""
    shared_memory: tuple[str, ...]
    """What is still there of the files that one of the program's processes was seen to have mapped."""
    temporary: tuple[str, ...]
    """In the folder for temporary files."""
    environment: Mapping[str, str]
    resident_bytes: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def footprint(temporary: Path, seen: Collection[int] = ()) -> Footprint:
    """Of this process, and of what it started; `temporary` is its folder, `seen` what `mapped_by_family` has found."""
    own = os.getpid()
    family = list(marked(os.environ.get(MARK)))
    return Footprint(
        threads=threads(),
        files=_count(_kind(target) for target in _open_files(own)),
        processes=tuple(sorted(_command(each) for each in family if each != own)),
        ports=tuple(sorted(_listening({own, *family}))),
        shared_memory=tuple(sorted(each.name for each in _entries(SHARED_MEMORY) if _inode(each) in seen)),
        temporary=tuple(sorted(each.name for each in _entries(temporary))),
        environment=dict(os.environ),
        resident_bytes=int(_read(Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def threads() -> dict[str, int]:
    """Name → how many this process has."""
    return _count(_read(each / "comm").strip() for each in _entries(Path("/proc/self/task")))


def marked(value: str | None) -> Iterator[int]:
    """Ids of the living processes that were started with this value of `MARK`."""
    if value is None:
        return
    for each in _process_ids():
        entries = _read(Path(f"/proc/{each}/environ")).split("\0")
        if f"{MARK}={value}" in entries and _command(each):  # one that has ended has no command line
            yield each


def end_of(value: str) -> list[str]:
    """Wait a little for the processes with this value of `MARK` to end; return the command lines of those that live."""
    deadline = time.monotonic() + PATIENCE_S
    while (living := list(marked(value))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [_command(each) for each in living]


def mapped_by_family() -> set[int]:
    """Inodes of the files in shared memory that the program's processes have mapped now."""
    return {number for each in {os.getpid(), *marked(os.environ.get(MARK))} for number in _mapped(each)}


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names))


def _process_ids() -> list[int]:
    return [int(each.name) for each in _entries(Path("/proc")) if each.name.isdigit()]


def _command(process_id: int) -> str:
    return _read(Path(f"/proc/{process_id}/cmdline")).replace("\0", " ").strip()


def _open_files(process_id: int) -> Iterator[str]:
    for each in _entries(Path(f"/proc/{process_id}/fd")):
        try:
            yield str(each.readlink())
        except OSError:
            continue  # closed meanwhile; such as the folder that lists them


def _kind(target: str) -> str:
    return target.partition(":")[0] if not target.startswith("/") else target


def _listening(family: set[int]) -> Iterator[str]:
    inodes = {target for each in family for target in _open_files(each) if target.startswith("socket:")}
    for table in ("tcp", "tcp6"):
        for row in _read(Path(f"/proc/net/{table}")).splitlines()[1:]:
            columns = row.split()
            if columns[3] == LISTENS and f"socket:[{columns[9]}]" in inodes:
                yield str(int(columns[1].rpartition(":")[2], 16))


def _mapped(process_id: int) -> set[int]:
    rows = (line.split(maxsplit=5) for line in _read(Path(f"/proc/{process_id}/maps")).splitlines())
    return {int(row[4]) for row in rows if len(row) > 5 and row[5].startswith(f"{SHARED_MEMORY}/")}


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
