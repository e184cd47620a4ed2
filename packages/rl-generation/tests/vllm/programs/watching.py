"""What an engine has taken of the machine, and waiting for something to become so, with a deadline.

Other programs may take and leave what they like meanwhile: only what the engine's own processes have mapped counts.
"""

import os
import threading
import time
from pathlib import Path

import psutil

PATIENCE_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


def until(condition, *, timeout_s=PATIENCE_S):
    """Return what `condition` returns once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.01)
    return found


def taken():
    """Ports that this process listens on, and threads and processes of an engine in it."""
    own = psutil.Process()
    ports = {each.laddr for each in own.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    threads = {each for each in threading.enumerate() if "rl-generation" in each.name}
    workers = {each.pid for each in own.children(recursive=True) if not _is_tracker(each)}
    return ports | threads | set(living(workers))


def shared_memory(process_ids):
    """Inode and name of each file in shared memory that one of these processes has mapped; some, if any lives."""
    mapped = {number for process_id in process_ids for number in _mapped(Path(f"/proc/{process_id}"))}
    found = {(each.inode(), each.name) for each in os.scandir(SHARED_MEMORY) if each.inode() in mapped}
    assert found or not living(process_ids), "no process of an engine has mapped any shared memory"
    return found


def left_of(files):
    """Those of `shared_memory` that are still there."""
    return files & {(each.inode(), each.name) for each in os.scandir(SHARED_MEMORY)}


def folder(engine):
    """Where the sockets of its processes are."""
    return engine._running._folder.path


def living(process_ids):
    """Those that have not ended."""
    return [each for each in process_ids if _runs(each)]


class Call:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call, *args, **others):
        self.value, self.error, self.seconds = None, None, None
        self._thread = threading.Thread(target=self._run, args=(call, args, others), daemon=True)
        self._thread.start()

    def _run(self, call, args, others):
        began = time.monotonic()
        try:
            self.value = call(*args, **others)
        except Exception as error:  # noqa: BLE001  (what it is, is the test)
            self.error = error
        self.seconds = time.monotonic() - began

    def join(self):
        """Return the error; None where it returned."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it hangs"
        return self.error


def _is_tracker(process):
    """Whether it is Python's own, which lives until its program ends; not one that ends while it is looked at."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _runs(process_id):
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _mapped(process):
    """Inodes: a semaphore is mapped under another name than its file has."""
    try:
        lines = (process / "maps").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}
