"""What an engine has taken of the machine, and waiting for something to become so, with a deadline."""

import os
import threading
import time
from pathlib import Path

import psutil

PATIENCE_S = 60.0
OURS = ("psm_", "vllm_dist_", "sem.mp-")
"""What Python and vLLM call their files in shared memory."""


def until(condition, *, timeout_s=PATIENCE_S):
    """Return what `condition` returns once that is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(0.01)
    return found


def taken():
    """Shared memory that no living process has mapped, listening ports and threads of this process."""
    mapped = {number for process in Path("/proc").iterdir() if process.name.isdigit() for number in _mapped(process)}
    files = {each.name for each in os.scandir("/dev/shm") if each.name.startswith(OURS) and each.inode() not in mapped}
    ports = {each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    threads = {each for each in threading.enumerate() if "rl-generation" in each.name}
    return files | ports | threads


def folder(engine):
    """Where the sockets of its processes are."""
    return engine._running._folder


def living(process_ids):
    """Those that have not ended."""
    return [each for each in process_ids if psutil.pid_exists(each) and psutil.Process(each).status() != "zombie"]


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


def _mapped(process):
    """Inodes: a semaphore is mapped under another name than its file has."""
    try:
        lines = (process / "maps").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "/dev/shm/" in line}
