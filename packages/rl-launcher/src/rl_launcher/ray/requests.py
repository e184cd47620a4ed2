"""Single requests over several engines on Ray: each has a future, and goes to the engine that has the fewest.

A request has its seed, so its response does not depend on which engine generated it. What an engine that died had not
finished goes to the others, or to its replacement once that has weights. Two kinds of threads live as long as requests
are under way: one sends requests, however many have come, in one call; one for each engine collects what is done.
"""

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rl_generation import Rollout, Sampling
from rl_generation.engine import check_single, failed_request
from rl_generation.requests import make_requests
from rl_launcher.ray.engine_pool import EngineDiedError, EnginePool, RunningEngine
from rl_launcher.ray.engine_worker import Begun, Collected
from rl_launcher.ray.remote_calls import Pending
from rl_launcher.ray.worker_failures import RemoteDiedError, RemoteFailedError, RemoteTimeoutError

ANSWER_S = 30.0
"""How much longer than its wait a call of `collect` may take."""


@dataclass(slots=True, eq=False)
class _Request:
    begun: Begun
    future: "Future[Rollout]"
    engine: RunningEngine | None = None
    """Where it is; None while it waits."""


class RequestDispatch:
    """The requests under way of a pool's engines. Guarded by the pool's `changed`."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        """Whoever takes a request out of it, completes its future."""
        self._sending = False
        self._collecting: set[int] = set()
        """The ids of engines that a thread collects from."""
        self.retried = 0
        """Requests that were sent again."""
        self.tokens_per_s = 0.0
        """Of all that were answered since the last time that none was under way; or of a later call of `generate`."""
        self._busy_since_s, self._tokens = 0.0, 0

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt; see `Engine.submit` of rl_generation."""
        try:
            check_single(sampling)
            (checked,) = make_requests([prompt], [sampling], self._engines.require_weights())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer to this request
            return failed_request(error)
        future: Future[Rollout] = Future()
        begun = Begun(number=next(self._numbers), prompt=checked.prompt, sampling=sampling, seed=seed)
        with self._engines.changed:
            if not self._requests:
                self._busy_since_s, self._tokens = time.monotonic(), 0
            self._requests[begun.number] = _Request(begun, future)
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._send, name="sending requests", daemon=True).start()
            self._engines.changed.notify_all()
        future.add_done_callback(lambda done: self._note_cancelled(begun.number, done))
        return future

    # -- Sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send what waits as long as something is under way."""
        changed, limit_s = self._engines.changed, self._engines.call_timeout_s
        error: BaseException | None = None
        while True:
            with changed:
                try:
                    in_time = changed.wait_for(lambda: not self._requests or self._can_send(), timeout=limit_s)
                    batches = self._assign()
                    error = None if in_time or self._collecting else self._no_engine()
                except BaseException as raised:  # noqa: BLE001 - raised again where the answers are taken
                    error, batches = raised, {}
                if not self._requests or error is not None:
                    self._sending, lost = False, list(self._requests)
                    break
            for engine, requests in batches.items():
                engine.process().submit("begin", [request.begun for request in requests])
        if error is not None:
            self._fail(lost, error)

    def _no_engine(self) -> EngineDiedError:
        states = ", ".join(f"engine {each.index} is {each.state}" for each in self._engines.all())
        return EngineDiedError(
            f"{len(self._waiting())} requests got no engine within cluster.call_timeout_s="
            f"{self._engines.call_timeout_s:g}: {states}"
        )

    def _waiting(self) -> list[_Request]:
        return [request for request in self._requests.values() if request.engine is None]

    def _can_send(self) -> bool:
        return bool(self._engines.serving() and self._waiting())

    def _assign(self) -> dict[RunningEngine, list[_Request]]:
        """Choose an engine for every request that waits, and have a thread collect from each; none serve, none go."""
        serving = self._engines.serving()
        batches: dict[RunningEngine, list[_Request]] = defaultdict(list)
        if not serving:
            return batches
        load = Counter(id(request.engine) for request in self._requests.values() if request.engine is not None)
        for request in self._waiting():
            engine = min(serving, key=lambda each: (load[id(each)], each.index))
            request.engine = engine
            load[id(engine)] += 1
            batches[engine].append(request)
        for engine in batches:
            if id(engine) not in self._collecting:
                self._collecting.add(id(engine))
                name = f"collecting from {engine}"
                threading.Thread(target=self._collect, args=(engine,), name=name, daemon=True).start()
        return batches

    # -- Collecting ---------------------------------------------------------------------------------------------------

    def _collect(self, engine: RunningEngine) -> None:
        """Complete what `engine` has done, until it has nothing left, dies or does not answer."""
        limit_s = self._engines.call_timeout_s
        look_s = min(limit_s, self._engines.hang_timeout_s / 2)
        answered_s = time.monotonic()
        while True:
            with self._engines.changed:
                mine = self._numbers_of(engine)
                if not mine:
                    self._collecting.discard(id(engine))
                    self._engines.changed.notify_all()
                    return
            why: BaseException | str | None = None
            try:
                reply: Collected = engine.process().call("collect", look_s, timeout_s=look_s + ANSWER_S)
            except RemoteDiedError as error:
                why, reply = error, Collected(rollouts={}, failures={}, died=error.how)
            except RemoteTimeoutError:
                why, reply = (
                    f"it is frozen: it has not answered for {look_s + ANSWER_S:g} seconds",
                    Collected(rollouts={}, failures={}),
                )
            except BaseException as error:  # noqa: BLE001 - raised again where the answers are taken
                self._fail(mine, error)
                continue
            for number, rollout in reply.rollouts.items():
                self._complete(number, rollout)
            for number, failure in reply.failures.items():
                self._complete(number, RemoteFailedError.of(failure, who=engine.process().who, call="submit"))
            if reply.rollouts or reply.failures:
                answered_s = time.monotonic()
            elif reply.died is None:
                why = self._engines.frozen(engine, patience_s=look_s)
            if (ended := reply.died if why is None else why) is not None:
                self._send_again(engine, ended)
            elif time.monotonic() - answered_s >= limit_s:
                self._fail(mine, Pending(engine.process(), "submit", None).timed_out(limit_s))

    def _numbers_of(self, engine: RunningEngine) -> list[int]:
        with self._engines.changed:
            return [number for number, request in self._requests.items() if request.engine is engine]

    def _send_again(self, engine: RunningEngine, why: BaseException | str) -> None:
        with self._engines.changed:
            numbers = self._numbers_of(engine)
            for number in numbers:
                self._requests[number].engine = None
            self.retried += len(numbers)
        self._engines.lost(engine, why, owed=f"its {len(numbers)} unfinished requests are sent again")

    def _complete(self, number: int, result: Rollout | BaseException) -> None:
        with self._engines.changed:
            request = self._requests.pop(number, None)
            if request is not None and isinstance(result, Rollout):
                self._tokens += len(result.tokens)
                self.tokens_per_s = self._tokens / max(time.monotonic() - self._busy_since_s, 1e-9)
            self._engines.changed.notify_all()
        if request is None or not request.future.set_running_or_notify_cancel():
            return
        if isinstance(result, Rollout):
            request.future.set_result(result)
        else:
            request.future.set_exception(result)

    def _fail(self, numbers: Sequence[int], error: BaseException) -> None:
        for number in numbers:
            self._complete(number, error)

    def _note_cancelled(self, number: int, future: "Future[Rollout]") -> None:
        if not future.cancelled():
            return
        with self._engines.changed:
            request = self._requests.pop(number, None)
            self._engines.changed.notify_all()
        if request is None:
            return
        future.set_running_or_notify_cancel()  # else concurrent.futures.wait would never count it as done
        if request.engine is not None and request.engine.state == "serving":
            request.engine.process().submit("cancel", [number])
