"""Calls with a deadline: many at once, plain functions on threads and coroutines on an event loop.

`DeadlineExecutor` runs what environments call. Every call is driven by one asyncio event loop on a daemon thread, which
bounds how many run at once and gives up those that are over their deadline. Python cannot stop a thread: a plain
function that is over its deadline is abandoned. Its thread is a daemon, its place goes to the next call, and whatever
it returns in the end is dropped; so it delays neither the calls beside it nor the end of the process. Until it returns
it keeps its memory, its files and its sockets.

A process that is forked has neither its parent's threads nor its locks: what asks by `forget_after_fork` begins anew.
"""

import asyncio
import concurrent.futures
import inspect
import math
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

__all__ = [
    "BlockedLoopError",
    "ClosedLoopError",
    "DeadlineExecutor",
    "Forgetful",
    "OnError",
    "Outcome",
    "TimedOutError",
    "check_limits",
    "describe",
    "forget_after_fork",
    "wait_for_all",
]

ResultT = TypeVar("ResultT")

SLACK_S = 1.0
"""How much longer than the longest deadline a busy event loop may take before it counts as blocked."""

LEFT_TO_PARENTS: list[asyncio.AbstractEventLoop] = []
"""Event loops of the process that this one was forked from. Closing one would take away the parent's wake-up pipe."""


class TimedOutError(RuntimeError):
    """A call was still running at its deadline."""


class BlockedLoopError(RuntimeError):
    """A coroutine blocks the event loop that it shares with the others."""


class ClosedLoopError(RuntimeError):
    """The executor was closed while calls were running on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended: with a value, or with an error."""

    value: Any = None
    """What it returned."""

    error: Exception | None = None
    """What it raised, or a `TimedOutError`."""

    def result(self) -> Any:
        """The value; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return self.value


Call: TypeAlias = Callable[[], Any]

OnError: TypeAlias = Literal["stop", "fail"]
"""What becomes of an error in one conversation: it stops the run, or fails one rollout."""


def check_limits(*, timeout_s: float, max_workers: int) -> None:
    """Refuse a deadline or a number of workers that makes no sense.

    Raises:
        ValueError: it does not.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s={timeout_s} must be a finite number of seconds > 0; every call has a deadline")
    if max_workers < 1:
        raise ValueError(f"max_workers={max_workers} must be >= 1")


def describe(error: Exception) -> str:
    """An error in one line, for people."""
    return str(error) if isinstance(error, TimedOutError) else f"{type(error).__name__}: {error}"


class DeadlineExecutor:
    """Runs plain and coroutine functions, `max_workers` at a time, each with a deadline that counts from its begin.

    It may be used from any thread but its own event loop's. It starts with the first call; a call after `close`, or in
    a process that was forked, starts it anew.
    """

    def __init__(self, *, max_workers: int) -> None:
        self._max_workers = max_workers
        self._begin()
        forget_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[Future[Any], float] = {}
        self._watched = False

    def forget(self) -> None:
        """Begin anew, in a process that was forked."""
        if self._loop is not None:
            self._stop.detach()
            LEFT_TO_PARENTS.append(self._loop)
        self._begin()

    def close(self) -> None:
        """Cancel what is under way and end the event loop's thread.

        Threads whose call hangs end when that returns, or with the process.
        """
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            self._stop()
            self._thread.join(timeout=SLACK_S)

    def submit(self, call: Call, *, timeout_s: float) -> "Future[Outcome]":
        """Begin a call; the future has its outcome, whatever it raised. Cancelling it gives the call up.

        Raises, from the future:
            BlockedLoopError: a coroutine blocks the event loop, by `time.sleep` say, so that not even deadlines pass.
            ClosedLoopError: the executor was closed meanwhile.
        """
        return self.spawn(self.call(call, timeout_s=timeout_s), timeout_s=timeout_s)

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Outcome]:
        """Make all calls and wait for them.

        Raises:
            BlockedLoopError, ClosedLoopError: as `submit`.
        """
        return wait_for_all(self.submit(call, timeout_s=timeout_s) for call in calls)

    async def call(self, call: Call, *, timeout_s: float) -> Outcome:
        """The outcome of a call, for what runs on this executor's event loop by `spawn`."""
        async with self._slots:
            coroutine = inspect.iscoroutinefunction(call)
            ending: asyncio.Future[Outcome] = (
                asyncio.ensure_future(_awaited(call)) if coroutine else asyncio.wrap_future(_on_a_thread(call))
            )
            try:
                # Not wait_for: it would wait for a coroutine that swallows its cancellation.
                done, _ = await asyncio.wait({ending}, timeout=timeout_s)
            except asyncio.CancelledError:
                ending.cancel()
                raise
            if not done:
                ending.cancel()
                return Outcome(error=TimedOutError(f"it ran longer than timeout_s={timeout_s:g}"))
            return Outcome(error=RuntimeError("it cancelled itself")) if ending.cancelled() else ending.result()

    def spawn(self, coroutine: Coroutine[Any, Any, ResultT], *, timeout_s: float) -> "Future[ResultT]":
        """Run a coroutine on the event loop; the future has its result, or raises as that of `submit`.

        Args:
            coroutine: awaits `call`; it must not block.
            timeout_s: the longest deadline of the calls that it makes.
        """
        promised: Future[ResultT] = Future()
        with self._lock:
            if self._loop is None:
                self._start()
            assert self._loop is not None
            loop, pending = self._loop, self._pending
            pending[promised] = timeout_s
            if not self._watched:
                self._watched = True
                threading.Thread(target=_watch, args=(weakref.ref(self), loop), name="rl-watch", daemon=True).start()
        running = asyncio.run_coroutine_threadsafe(coroutine, loop)

        def finish(ended: "Future[ResultT]") -> None:
            pending.pop(promised, None)
            if promised.done():  # given up, or the loop was blocked
                return
            if ended.cancelled():
                promised.set_exception(ClosedLoopError("the event loop was closed while calls were running on it"))
            elif (error := ended.exception()) is not None:
                promised.set_exception(error)
            else:
                promised.set_result(ended.result())

        running.add_done_callback(finish)
        promised.add_done_callback(lambda given_up: running.cancel() if given_up.cancelled() else None)
        return promised

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self._max_workers)
        self._pending, self._watched = {}, False
        self._thread = threading.Thread(target=_loop_forever, args=(self._loop,), name="rl-event-loop", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop_loop, self._loop)

    def check(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Fail what is pending if the event loop does not answer; whether there is anything to watch."""
        with self._lock:
            if self._loop is not loop:
                return False
            if not self._pending:
                self._watched = False
                return False
            pending, limit = self._pending, max(list(self._pending.values()), default=0.0) + SLACK_S
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # it was closed
            return False
        if not answered.wait(limit):
            for promised in list(pending):
                if not promised.done():
                    promised.set_exception(
                        BlockedLoopError(
                            f"an async environment has blocked its event loop for more than {limit:g} s, and with it "
                            f"every other conversation and every deadline; await what takes long (asyncio.sleep, "
                            f"asyncio.to_thread)"
                        )
                    )
        return True


def wait_for_all(futures: "Iterable[Future[ResultT]]") -> list[ResultT]:
    """The results, once all are there; raises the first error in their order.

    Ctrl-C gives them all up, also when it comes while an iterator is still submitting them.
    """
    begun: list[Future[ResultT]] = []
    try:
        for future in futures:
            begun.append(future)  # noqa: PERF402 - a list() would lose those that were begun before it raised
        concurrent.futures.wait(begun)
    except BaseException:
        for future in reversed(begun):  # those that wait for a place first: they must not get it now
            future.cancel()
        raise
    return [future.result() for future in begun]


def _watch(executor: "weakref.ref[DeadlineExecutor]", loop: asyncio.AbstractEventLoop) -> None:
    pause = threading.Event()
    while (watched := executor()) is not None and watched.check(loop):
        del watched  # dropping the executor ends its loop
        pause.wait(SLACK_S)


def _on_a_thread(call: Call) -> "Future[Outcome]":
    """Start a daemon thread for one call. `ThreadPoolExecutor`'s would keep the process from ending while one hangs."""
    future: Future[Outcome] = Future()

    def work() -> None:
        if future.set_running_or_notify_cancel():
            try:
                outcome = Outcome(value=call())
            except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who waits
                outcome = Outcome(error=error)
            except BaseException as error:  # noqa: BLE001 - `sys.exit` ends the episode that called it, not the run
                outcome = _no_exit(error)
            future.set_result(outcome)

    threading.Thread(target=work, name="rl-environment", daemon=True).start()
    return future


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Outcome:
    try:
        return Outcome(value=await call())
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who waits
        return Outcome(error=error)
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop for everybody
        return _no_exit(error)


def _no_exit(error: BaseException) -> Outcome:
    return Outcome(error=RuntimeError(f"it raised {type(error).__name__}({error})"))


def _loop_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=SLACK_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)


# -- Processes that are forked ---------------------------------------------------------------------------------------


@runtime_checkable
class Forgetful(Protocol):
    """Something that can begin anew."""

    def forget(self) -> None:
        """Drop threads, locks, queues and pipes, without closing what the parent still uses."""


_FORGETFUL: "weakref.WeakSet[Forgetful]" = weakref.WeakSet()


def forget_after_fork(each: Forgetful) -> None:
    """Have `each.forget()` called in every process that is forked from now on, for as long as it is there.

    A lock that another thread held at the fork stays locked, and a queue that threads served is served by nobody.
    """
    _FORGETFUL.add(each)


def _forget_all() -> None:
    for each in list(_FORGETFUL):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
