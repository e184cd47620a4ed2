"""Single requests of an engine that steps, each with a future, and the turns in which threads step it.

The thread of `SubmittedRequests` steps the engine as long as such requests are under way, and ends with the last of
them: an idle engine has no thread. Other threads may call the engine meanwhile; whoever has the turn steps for all.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import final

from rl_generation.errors import EngineDeadError, PromptError
from rl_generation.requests import Sampling
from rl_generation.rollout import Rollout

__all__ = ["Call", "Outcome", "SubmittedRequests", "Turns", "check_single", "failed_request"]

Outcome = tuple["Future[Rollout]", Rollout | BaseException]
"""A request, and what has become of it."""


def check_single(sampling: Sampling) -> None:
    """Raise PromptError where `sampling` asks for several answers: a future has one."""
    if sampling.n != 1:
        raise PromptError(f"submit answers a prompt once, and sampling.n={sampling.n}: submit it {sampling.n} times")


def failed_request(error: Exception) -> "Future[Rollout]":
    """The future of a request that was refused."""
    future: Future[Rollout] = Future()
    future.set_exception(error)
    return future


@final
@dataclass(slots=True, eq=False)
class Call:
    """A call of `generate`: whoever has the turn steps for all, so its answers may come in another thread's step."""

    missing: int
    """Answers that are not there yet."""
    rollouts: list[Rollout] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self.missing or self.error is not None

    def settle(self, result: Rollout | BaseException) -> None:
        """Take the next answer, or why there is none."""
        if isinstance(result, Rollout):
            self.rollouts.append(result)
            self.missing -= 1
        else:
            self.error = self.error or result


@final
class Turns:
    """A lock for threads that step an engine in a loop and for others, who wait for one turn each, or about that.

    Of a `threading.Lock`, the former would have nearly every turn. Who has it may enter again.
    """

    def __init__(self) -> None:
        self._door, self._room = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if not self.mine:
            with self._door:  # whoever waits within comes before a thread that has just had its turn
                self._room.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._room.release()


@final
class SubmittedRequests:
    """The requests under way that have a future.

    Args:
        begin: Takes a request into the engine; called with its future, which is its name, and with what `submit` was
            given. Called in a turn.
        abort: Takes a request out of the engine, if it is there. Called in a turn.
        step: Steps the engine once and tells what has become of requests by `settle`; raises where all are lost.
    """

    def __init__(
        self,
        *,
        begin: Callable[..., None],
        abort: Callable[["Future[Rollout]"], None],
        step: Callable[[], None],
    ) -> None:
        self._begin, self._abort, self._step = begin, abort, step
        self._lock = threading.Lock()
        self._under_way: set[Future[Rollout]] = set()
        """Whoever takes a future out of it, completes it; cancelled ones too, or `wait` would not count them."""
        self._arrived: list[tuple[Future[Rollout], tuple[object, ...]]] = []
        self._cancelled: list[Future[Rollout]] = []
        self._thread: threading.Thread | None = None

    def submit(self, *request: object) -> "Future[Rollout]":
        """Have it answered from the next step on. Cancelling the future, at any time, aborts it."""
        future: Future[Rollout] = Future()
        with self._lock:
            self._under_way.add(future)
            self._arrived.append((future, request))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="rl-generation submitted")
                self._thread.start()
        future.add_done_callback(self._notice_cancelled)
        return future

    def admit(self) -> list[Outcome]:
        """In a turn: take into the engine what has arrived, and out what was cancelled; return what is over so."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        outcomes: list[Outcome] = []
        for future, request in arrived:
            if future.cancelled():
                outcomes.append((future, CancelledError()))
                continue
            try:
                self._begin(future, *request)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
                outcomes.append((future, error))
        for future in cancelled:
            self._abort(future)
            outcomes.append((future, CancelledError()))
        return outcomes

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """Complete futures; not in a turn, for their callbacks may do anything."""
        for future, result in outcomes:
            with self._lock:
                mine = future in self._under_way
                self._under_way.discard(future)
            if not mine or not future.set_running_or_notify_cancel():
                continue
            if isinstance(result, Rollout):
                future.set_result(result)
            else:
                future.set_exception(result)

    def fail(self, error: BaseException) -> None:
        """End all requests with `error`; the engine has forgotten them, or is about to."""
        with self._lock:
            lost = list(self._under_way)
            self._arrived.clear()
        self.settle([(future, error) for future in lost])

    def join(self) -> None:
        """Wait until the thread has ended, which it does once no request is under way."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _notice_cancelled(self, future: "Future[Rollout]") -> None:
        if future.cancelled():
            with self._lock:
                self._cancelled.append(future)

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._under_way:
                    self._thread = None
                    return
            # Nobody is left to read the answers, and the interpreter waits for this thread before it ends.
            if not threading.main_thread().is_alive():
                self.fail(EngineDeadError("the program ended while this request was under way"))
                continue
            try:
                self._step()
            except BaseException as error:  # noqa: BLE001 - raised again where the answers are taken
                self.fail(error)
