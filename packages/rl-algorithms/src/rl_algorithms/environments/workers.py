"""Other processes that judge, each with a deadline: for what may take for ever and cannot be interrupted in this one.

`verify_worker.py` does, and runs here as a script. A worker answers one request after another, a line of JSON each; one
that misses the deadline is killed with all its children, and the next request starts another. Workers see none of this
process's environment variables but those that say where Python's modules are.
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_algorithms.environments.executor import forget_after_fork

__all__ = ["WORKERS", "Workers"]

SCRIPT = Path(__file__).with_name("verify_worker.py")
# Importing what knows mathematics takes a second or two, and longer on a machine that is busy.
START_TIMEOUT_S = 120.0


class Workers:
    """Processes that judge requests at once, `num_workers` at a time. They start when first needed.

    Args:
        num_workers: how many requests are judged at once.
        timeout_s: seconds that each request gets.
        memory_bytes: address space of each process.

    Raises:
        ValueError: an argument is not above 0.
    """

    def __init__(self, *, num_workers: int = 1, timeout_s: float = 5.0, memory_bytes: int = 4 << 30) -> None:
        for name, value in {"num_workers": num_workers, "timeout_s": timeout_s, "memory_bytes": memory_bytes}.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be > 0")
        self._num_workers, self._timeout_s, self._memory_bytes = num_workers, timeout_s, memory_bytes
        self._begin()
        forget_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._idle: queue.SimpleQueue[_Worker | None] | None = None
        self._started: set[_Worker | None] = set()
        self._close = weakref.finalize(self, _end_all, self._started)

    def forget(self) -> None:
        """Leave the processes to the parent, in a process that was forked: two would read each other's replies."""
        self._close.detach()
        self._begin()

    def run(self, requests: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        """The reply to each request: what the script says, `{"timed_out": True}`, or `{"died": how}`."""
        if not requests:
            return []
        if self._num_workers == 1 or len(requests) == 1:
            return [self._ask(request) for request in requests]
        with ThreadPoolExecutor(max_workers=min(self._num_workers, len(requests))) as threads:
            return list(threads.map(self._ask, requests))

    def close(self) -> None:
        """End the processes; the next request starts new ones."""
        with self._lock:
            self._idle = None
        _end_all(self._started)

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        with self._lock:
            if self._idle is None:
                self._idle = queue.SimpleQueue()
                for _ in range(self._num_workers):
                    self._idle.put(None)
            idle = self._idle
        worker = idle.get()
        try:
            if worker is None or not worker.alive:
                self._started.discard(worker)
                worker = _Worker(timeout_s=self._timeout_s, memory_bytes=self._memory_bytes)
                self._started.add(worker)
            return worker.ask(request)
        finally:
            idle.put(worker)


class _Worker:
    """One process."""

    def __init__(self, *, timeout_s: float, memory_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._received = b""
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, "-P", str(SCRIPT), str(memory_bytes), str(timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in a terminal is for us, and the whole session can be killed
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        # Imports belong to the start, not to the first request; the worker says when it is done with them.
        imported = self._line(json.dumps({"do": "import", "what": request["do"]}), START_TIMEOUT_S)
        reply = imported if "ready" not in imported else self._line(json.dumps(request), self._timeout_s)
        if reply.get("timed_out") or reply.get("died"):
            self.end()
        return reply

    def end(self) -> None:
        """Kill it and its children, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what a dead process never read cannot be flushed
                assert stream is not None
                stream.close()

    def _line(self, request: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return self._death()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return {"timed_out": True}
                if not (more := os.read(self._process.stdout.fileno(), 1 << 16)):
                    return self._death()
                self._received += more
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> dict[str, Any]:
        code = self._process.wait()
        if code == -signal.SIGALRM:  # the worker's own alarm, a moment before ours
            return {"timed_out": True}
        return {"died": f"exit code {code}"}


def _end_all(workers: "set[_Worker | None]") -> None:
    while workers:
        if worker := workers.pop():
            worker.end()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return {**kept, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


WORKERS = Workers()
"""What verifiers use that are plain functions: one process, started when first needed."""
