"""Whether an `AsyncLLM` and its processes live, and how whatever waits for a dead one comes to an end.

vLLM notices the death of its engine process within a second and ends the requests that wait for tokens; whoever waits
for the answer of another call waits for ever, and nobody learns which process died of what.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar, final

from rl_generation.errors import EngineDeadError
from rl_generation.vllm.processes import EngineProcesses

__all__ = ["Health"]

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
        processes: Its processes; none where it lives in this one.
    """

    def __init__(self, llm: Any, processes: EngineProcesses) -> None:
        self.death: str | None = None
        self._llm, self._processes = llm, processes
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
        found = self._processes.dead()
        if found is not None:
            self.end(f"{found}; what had finished is in this error's `rollouts`, and restart() makes a new engine")

    async def _wait_for_a_process_to_blame(self) -> None:
        """Where vLLM says that its engine failed, which may come before a process has ended, or without that."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while self.death is None and self._llm.errored:
            if not self._processes.roots or asyncio.get_running_loop().time() > deadline:
                cause = getattr(self._llm.engine_core, "failure", None)  # of a core in this process
                said = "and its log says why" if cause is None else f"in a step: {type(cause).__name__}: {cause}"
                self.end(f"vLLM's engine failed, {said}; restart() makes a new engine")
                return
            await asyncio.sleep(PERIOD_S)
            self._look()
