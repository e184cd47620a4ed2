"""Whether the processes of an `AsyncLLM` live, and how whatever waits for a dead one comes to an end.

vLLM notices the death of its engine process within a second and ends the requests that wait for tokens; whoever waits
for the answer of another call waits for ever, and nobody learns which process died of what. Reads /proc, so it works
on Linux only.
"""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from rl_generation.errors import EngineDeadError
from rl_generation.vllm.processes import EngineProcesses

__all__ = ["Health", "dead_root", "dead_worker", "engine_roots", "workers_of"]

T = TypeVar("T")
PERIOD_S = 0.25
"""Between two looks at the processes."""

PATIENCE_S = 5.0
"""How long a process may take to end once vLLM has said that its engine failed."""


@final
class Health:
    """Runs what waits for the engine, and ends all of it with EngineDeadError when a process of the engine dies.

    Lives on the event loop of the engine.

    Args:
        llm: The `AsyncLLM`.
        processes: Its processes, of which the roots are watched, and the workers below them.
    """

    def __init__(self, llm: Any, processes: EngineProcesses) -> None:
        self.death: str | None = None
        self._llm, self._processes = llm, processes
        self._workers = workers_of(processes)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watch = asyncio.create_task(self._look_now_and_then())

    def check(self) -> None:
        """Raise EngineDeadError where a process is known to be dead, or found to be."""
        if self.death is None:
            self._look()
        if self.death is not None:
            raise EngineDeadError(self.death)

    def start(self, what: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin `what`, which is cancelled when the engine dies."""
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.death is not None:
            task.cancel()
        return task

    async def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Await `what`.

        Raises:
            EngineDeadError: The engine is dead, or dies meanwhile.
        """
        task = self.start(what)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        return await self.result(task)

    async def result(self, task: "asyncio.Task[T]") -> T:
        """Return what `task`, which is done, returned; where it failed because the engine is dead, say so instead."""
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return task.result()
            if not isinstance(error, EngineDeadError):
                self._look()
                await self._wait_for_a_process_to_blame()
            if self.death is None:
                raise error
        raise EngineDeadError(self.death or "the call was cancelled")

    def end(self, reason: str) -> None:
        """Cancel whatever waits; from now on, everything raises EngineDeadError with `reason`."""
        if self.death is None:
            self.death = reason
        self._watch.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    async def _look_now_and_then(self) -> None:
        while self.death is None:
            self._look()
            await self._wait_for_a_process_to_blame()
            await asyncio.sleep(PERIOD_S)

    def _look(self) -> None:
        found = dead_root(self._processes) or dead_worker(self._workers)
        if found is not None:
            self.end(f"{found}; what had finished is in this error's `rollouts`, and restart() makes a new engine")

    async def _wait_for_a_process_to_blame(self) -> None:
        """Where vLLM says that its engine failed, which may come before a process has ended, or without that."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while self.death is None and self._llm.errored:
            if asyncio.get_running_loop().time() > deadline:
                self.end("vLLM's engine failed, and its log says why; restart() makes a new one")
            await asyncio.sleep(PERIOD_S)
            self._look()


def engine_roots(llm: Any) -> list[Any]:
    """The `multiprocessing.Process` objects that an `AsyncLLM` started: its engines, and what coordinates them."""
    resources = llm.engine_core.resources
    roots = list(getattr(resources.engine_manager, "processes", ()))
    if resources.coordinator is not None:
        roots.append(resources.coordinator.proc)
    return roots


def workers_of(processes: EngineProcesses) -> dict[int, tuple[str, str]]:
    """Process id of each worker below the roots → its title, and when it began.

    A worker is what vLLM has titled as one; compilers and trackers come and go.
    """
    found = {}
    for process_id in processes.process_ids:
        title, began = _title(process_id), _began(process_id)
        if began is not None and "Worker" in title:
            found[process_id] = (title, began)
    return found


def dead_root(processes: EngineProcesses) -> str | None:
    """Say which root is dead, and how it ended; None where all live."""
    for root in processes.roots:
        if not root.is_alive():
            return f"{root.name} (process {root.pid}) of the engine is dead: {_ending(root.exitcode)}"
    return None


def dead_worker(workers: Mapping[int, tuple[str, str]]) -> str | None:
    """Say which worker is dead; None where all live. How it ended is known to its parent alone."""
    for process_id, (title, began) in workers.items():
        if _began(process_id) != began:
            return f"{title} (process {process_id}) of the engine is dead; vLLM's log may say of what"
    return None


def _title(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text(encoding="utf-8").partition("\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _began(process_id: int) -> str | None:
    """When a living process began, which tells it from a later one of the same number; None where it is dead."""
    try:
        row = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if row[0] in "ZX" else row[19]


def _ending(code: int | None) -> str:
    if code is None:
        return "how it ended is unknown"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"
