"""Calls with a deadline: many at once, on threads or on one event loop, none able to hold up the others.

Python cannot stop a thread: a call that is over its deadline is abandoned. Its thread is a daemon, another takes its
place, and whatever it returns in the end goes nowhere; so it delays neither the calls beside it nor the end of the
process. Until it returns it keeps its memory, its files and its sockets.
"""

import asyncio
import inspect
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

from rl_algorithms.environments.forks import forget_after_fork

__all__ = [
    "BlockedLoopError",
    "ClosedLoopError",
    "EventLoop",
    "OnError",
    "Outcome",
    "Runner",
    "TimedOutError",
    "Workers",
    "check_limits",
    "describe",
]

# A loop that is merely busy gets this long beyond the deadline of a call before anyone asks whether it is blocked.
SLACK_S = 1.0
# Event loops of the process that this one was forked from: closing one would take the parent's wake-up pipe from it.
LEFT_TO_PARENTS: list[asyncio.AbstractEventLoop] = []


class TimedOutError(RuntimeError):
    """A call was still running at its deadline."""


class BlockedLoopError(RuntimeError):
    """A coroutine blocks the event loop that it shares with the others."""


class ClosedLoopError(RuntimeError):
    """An event loop was closed while calls were running on it."""


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


class Workers:
    """At most `max_workers` calls at a time, each on a daemon thread; a deadline counts from when a call begins.

    Consecutive calls come from different threads, so what is called must not depend on which it is. A process that is
    forked begins threads of its own.
    """

    def __init__(self, *, max_workers: int) -> None:
        self._max_workers = max_workers
        self._begin()
        forget_after_fork(self)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._end = weakref.finalize(self, self._jobs.put, None)

    def forget(self) -> None:
        """Begin anew, in a process that was forked."""
        self._end.detach()
        self._begin()

    def close(self) -> None:
        """End the threads, each when its call returns; a later call begins new ones."""
        with self._lock:
            jobs, self._jobs, self._num_threads = self._jobs, SimpleQueue(), 0
            self._end.detach()
            self._end = weakref.finalize(self, self._jobs.put, None)
        jobs.put(None)

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Outcome]:
        """Make all calls and wait for them, each for at most `timeout_s` seconds. May itself be called from threads."""
        events: SimpleQueue[tuple[int, float | Outcome]] = SimpleQueue()
        jobs = [_Job(index, call, events) for index, call in enumerate(calls)]
        with self._lock:
            queue, missing = self._jobs, min(len(jobs), self._max_workers) - self._num_threads
            self._num_threads += max(0, missing)
            for job in jobs:
                queue.put(job)
        try:
            for _ in range(missing):
                _start_thread(queue)
            return _wait(jobs, events, queue, timeout_s=timeout_s)
        finally:
            # Nobody waits any more for what is left when Ctrl-C comes: it must not keep its place.
            for job in jobs:
                if job.abandon():
                    _start_thread(queue)


def _wait(
    jobs: "Sequence[_Job]",
    events: "SimpleQueue[tuple[int, float | Outcome]]",
    queue: "SimpleQueue[_Job | None]",
    *,
    timeout_s: float,
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadlines: dict[int, float] = {}  # of the calls that have begun, in the order in which they began
    while len(outcomes) < len(jobs):
        first = next(iter(deadlines), None)
        wait = None if first is None else max(0.0, deadlines[first] - time.monotonic())
        try:
            index, event = events.get(timeout=wait)
        except Empty:
            assert first is not None
            if jobs[first].abandon():
                _start_thread(queue)
                outcomes[first] = _timed_out(timeout_s)
                del deadlines[first]
            continue  # otherwise it ended at this very moment, and the event is on its way
        if isinstance(event, Outcome):
            outcomes[index] = event
            del deadlines[index]
        else:
            deadlines[index] = event + timeout_s
    return [outcomes[index] for index in range(len(jobs))]


def _start_thread(queue: "SimpleQueue[_Job | None]") -> None:
    # The thread knows the queue and not the workers, so that dropping them ends it.
    threading.Thread(target=_work, args=(queue,), name="rl-environment", daemon=True).start()


class _Job:
    """One call and its state, which a thread and the one who waits change under a lock."""

    def __init__(self, index: int, call: Call, events: "SimpleQueue[tuple[int, float | Outcome]]") -> None:
        self.index, self.call, self.events = index, call, events
        self._lock = threading.Lock()
        self._begun = self._over = False

    def begin(self) -> bool:
        """Start its clock; False where nobody waits any more."""
        with self._lock:
            if not self._over:
                self._begun = True
                self.events.put((self.index, time.monotonic()))
            return self._begun

    def finish(self, outcome: Outcome) -> bool:
        """Hand the outcome over; False where nobody waits any more."""
        with self._lock:
            if self._over:
                return False
            self._over = True
            self.events.put((self.index, outcome))
            return True

    def abandon(self) -> bool:
        """Stop waiting; True where a thread is at it, which then needs a successor."""
        with self._lock:
            was_running, self._over = self._begun and not self._over, True
            return was_running


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        if not job.begin():
            del job
            continue
        try:
            outcome = Outcome(value=job.call())
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who waits
            outcome = Outcome(error=error)
        except BaseException as error:  # noqa: BLE001 - `sys.exit` ends the episode that called it, not the run
            outcome = _no_exit(error)
        if not job.finish(outcome):
            return  # another thread took this one's place
        del job, outcome  # an idle thread keeps nothing of its last call alive
    jobs.put(None)  # and so end the next


class EventLoop:
    """One event loop on a daemon thread of its own, for coroutines that live longer than one call.

    A process that is forked gets a loop of its own when it first needs one.
    """

    def __init__(self, *, max_concurrency: int) -> None:
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()
        self._forked = False
        self._begin()
        forget_after_fork(self)

    def _begin(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self._max_concurrency)
        self._thread = threading.Thread(target=_loop_forever, args=(self._loop,), name="rl-event-loop", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop_loop, self._loop)

    def run(self, calls: Sequence[Callable[[], Awaitable[Any]]], *, timeout_s: float) -> list[Outcome]:
        """Make all calls, at most `max_concurrency` at a time, and wait for each at most `timeout_s` seconds.

        A coroutine that is over its deadline is cancelled, and not waited for even where it swallows that.

        Raises:
            BlockedLoopError: a coroutine blocks the loop, by `time.sleep` say, so that not even deadlines pass.
            ClosedLoopError: somebody closed it meanwhile.
        """
        assert threading.current_thread() is not self._thread, "a coroutine waits for its own event loop"
        with self._lock:
            if self._forked:
                self._begin()
                self._forked = False
        future = asyncio.run_coroutine_threadsafe(_gather(calls, slots=self._slots, timeout_s=timeout_s), self._loop)
        while True:
            try:
                return future.result(timeout=timeout_s + SLACK_S)
            except TimeoutError:
                self._check_responsive(timeout_s)
            except CancelledError as error:
                raise ClosedLoopError("the event loop was closed while calls were running on it") from error

    def forget(self) -> None:
        """Begin anew when next needed, in a process that was forked."""
        self._stop.detach()
        LEFT_TO_PARENTS.append(self._loop)
        self._lock, self._forked = threading.Lock(), True

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        if not self._forked:
            self._stop()
            self._thread.join(timeout=SLACK_S)

    def _check_responsive(self, timeout_s: float) -> None:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        if not answered.wait(timeout_s + SLACK_S):
            raise BlockedLoopError(
                f"an async environment has blocked its event loop for more than {timeout_s + SLACK_S:g} s, and with it "
                f"every other conversation and every deadline; await what takes long (asyncio.sleep, asyncio.to_thread)"
            )


async def _gather(
    calls: Sequence[Callable[[], Awaitable[Any]]], *, slots: asyncio.Semaphore, timeout_s: float
) -> list[Outcome]:
    return list(await asyncio.gather(*(_one(call, slots=slots, timeout_s=timeout_s) for call in calls)))


async def _one(call: Callable[[], Awaitable[Any]], *, slots: asyncio.Semaphore, timeout_s: float) -> Outcome:
    async def awaited() -> Outcome:
        try:
            return Outcome(value=await call())
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the one who waits
            return Outcome(error=error)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop for everybody
            return _no_exit(error)

    async with slots:
        task = asyncio.ensure_future(awaited())
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            return _timed_out(timeout_s)
        return Outcome(error=RuntimeError("it cancelled itself")) if task.cancelled() else task.result()


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


class Runner:
    """Calls that may be plain or coroutine functions: the ones on threads, the others on one event loop."""

    def __init__(self, *, max_workers: int) -> None:
        self._max_workers = max_workers
        self._workers = Workers(max_workers=max_workers)
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        forget_after_fork(self)

    def forget(self) -> None:
        """Take another lock, in a process that was forked; workers and loop look after themselves."""
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Call], *, timeout_s: float) -> list[Outcome]:
        """Make all calls; wait for each at most `timeout_s` seconds from when it began.

        Raises:
            BlockedLoopError, ClosedLoopError: see `EventLoop.run`.
        """
        awaited = [index for index, call in enumerate(calls) if inspect.iscoroutinefunction(call)]
        if not awaited:
            return self._workers.run(calls, timeout_s=timeout_s)
        outcomes = dict(zip(awaited, self.loop.run([calls[i] for i in awaited], timeout_s=timeout_s), strict=True))
        plain = [index for index in range(len(calls)) if index not in outcomes]
        outcomes |= zip(plain, self._workers.run([calls[i] for i in plain], timeout_s=timeout_s), strict=True)
        return [outcomes[index] for index in range(len(calls))]

    @property
    def loop(self) -> EventLoop:
        """The event loop, begun when it is first needed."""
        with self._lock:
            if self._loop is None:
                self._loop = EventLoop(max_concurrency=self._max_workers)
            return self._loop

    def close(self) -> None:
        """End the event loop and the threads. One whose call hangs ends when that returns, or with the process."""
        self._workers.close()
        with self._lock:
            if self._loop is not None:
                self._loop.close()
                self._loop = None


def _timed_out(timeout_s: float) -> Outcome:
    return Outcome(error=TimedOutError(f"it ran longer than timeout_s={timeout_s:g}"))


def _no_exit(error: BaseException) -> Outcome:
    return Outcome(error=RuntimeError(f"it raised {type(error).__name__}({error})"))
