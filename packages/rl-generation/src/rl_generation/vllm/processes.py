"""The processes of an engine: which they are, when one of them dies, and what they leave behind in shared memory.

Reads /proc, so this is Linux. Does not know requests.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

from rl_generation.child_process import process_stat
from rl_generation.vllm.leftovers import SHARED_MEMORY, mapped_shared_memory

__all__ = ["EngineProcesses", "Watchdog"]

PREFIX = "vllm_dist_"
"""What vLLM's ranks on a CPU call their shared memory, which they leave even at a clean end."""
KILL_TIMEOUT_S = 30.0
"""How long a process that was killed may take to end; only one that waits in the kernel takes that long."""


@final
class EngineProcesses:
    """All processes under `roots`, and the shared memory that they had mapped when this was made.

    Args:
        roots: `multiprocessing.Process` objects that the engine started.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.roots = tuple(roots)
        self._started: dict[int, int] = {}
        self._files: set[Path] = set()
        self.survey()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of all that were found, living or not."""
        return tuple(self._started)

    def survey(self) -> None:
        """Look for further processes and shared memory."""
        for process_id, started in _below({root.pid for root in self.roots}).items():
            self._started[process_id] = started
            mapped = mapped_shared_memory(process_id).values()
            self._files |= {path for path in mapped if path.parent == SHARED_MEMORY and path.name.startswith(PREFIX)}

    def dead(self) -> str | None:
        """Say which of the roots is dead, with its exit code; None where all live."""
        for root in self.roots:
            if not root.is_alive():
                return f"process {root.pid} of the engine is gone (exit code {root.exitcode})"
        return None

    def wait_for_death(self, *, timeout_s: float) -> None:
        """Return once a root is known to be dead, or after `timeout_s`: its exit code may be a moment behind."""
        deadline = time.monotonic() + timeout_s
        while self.roots and self.dead() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all have ended, kill those that have not, and remove what they left in shared memory."""
        self._wait(timeout_s)
        for process in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        # A worker is no child of this process, and on a busy machine one that was killed needs a while to end.
        self._wait(KILL_TIMEOUT_S)
        for root in self.roots:
            root.join(timeout_s)
        for file in self._files:
            file.unlink(missing_ok=True)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._living() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _living(self) -> list[int]:
        found = {process_id: process_stat(process_id) for process_id in self._started}
        return [process_id for process_id, stat in found.items() if stat and stat.started == self._started[process_id]]


@final
class Watchdog:
    """Ends the waiting of a caller whose engine process was killed: vLLM's own client would wait for ever.

    vLLM's monitor closes the sockets of a dead engine and tells nobody who waits for an answer already. Until `close`,
    a thread looks whether a root of `processes` is dead, and then fails what waits.

    Args:
        client: vLLM's `SyncMPClient`.
        processes: Its processes.
        interval_s: Seconds between two looks once one is dead.
    """

    def __init__(self, client: Any, processes: EngineProcesses, *, interval_s: float = 0.1) -> None:
        self._client, self._processes, self._interval_s = client, processes, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rl-generation-watchdog")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        sentinels = [root.sentinel for root in self._processes.roots]
        while not self._closed.is_set():
            if wait(sentinels, timeout=self._interval_s):
                self._fail_what_waits()
                self._closed.wait(self._interval_s)

    def _fail_what_waits(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._client.resources.engine_dead = True
        if self._client.outputs_queue.empty():
            self._client.outputs_queue.put_nowait(EngineDeadError())
        waiting: dict[int, Future[Any]] = self._client.utility_results
        for call in list(waiting):
            future = waiting.pop(call, None)
            if future is not None:
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(EngineDeadError())


def _below(roots: set[int]) -> dict[int, int]:
    """Process id → start of `roots` and all of their descendants that live."""
    stats = {int(each.name): process_stat(int(each.name)) for each in Path("/proc").iterdir() if each.name.isdigit()}
    found: dict[int, int] = {}
    newest = roots
    while newest:
        found |= {process_id: stat.started for process_id in newest if (stat := stats.get(process_id)) is not None}
        newest = {process_id for process_id, stat in stats.items() if stat and stat.parent in newest} - found.keys()
    return found
