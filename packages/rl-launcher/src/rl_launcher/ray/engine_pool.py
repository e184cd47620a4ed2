"""The engines of a run: started together, watched, and replaced when they die.

An engine is always in one of these states:

    starting   its process is being made
    waiting    it runs, and has no weights yet
    serving    it has the weights that were last committed
    gone       it died, and is not replaced

A dead engine is restarted at once, in a thread; then `healer` may bring it the weights. When engines die more often
than the recipe allows, the next caller gets an `EngineDiedError`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_generation import TrainingEngineSpec
from rl_generation.requests import Limits
from rl_generation.vllm.processes import ChildProcess
from rl_launcher.errors import Refusal, RestartableError
from rl_launcher.ray.cluster import LOOPBACK
from rl_launcher.ray.engine_worker import EngineInfo, EngineWorker
from rl_launcher.ray.remote_calls import Actor, Pending
from rl_launcher.ray.worker_failures import RemoteDiedError, RemoteError, RemoteTimeoutError, died

CLOSE_GRACE_S = 10.0
"""Seconds that `EnginePool.close` waits for a replacement that is just starting, to end it."""

OnEvent = Callable[[str, str, str], None]
"""Called with the name of an event, a sentence, and the reaction to it."""


class EngineDiedError(RestartableError):
    """An engine died, and is not restarted."""

    condition = "engine_died"
    weights_lost = False


@dataclass(slots=True, kw_only=True, eq=False)
class RunningEngine:
    """One engine, until it dies; its replacement is another object with the same index."""

    index: int
    actor: Actor | None
    """None until its process is made."""
    host: str
    """Address of the node of its actor."""
    state: Literal["starting", "waiting", "serving", "gone"] = "starting"
    started: EngineInfo | None = None
    """None while it starts."""

    def info(self) -> EngineInfo:
        """What it reported once it had started."""
        assert self.started is not None
        return self.started

    def process(self) -> Actor:
        """Its actor."""
        assert self.actor is not None
        return self.actor

    def __str__(self) -> str:
        """As messages name it."""
        return f"engine {self.index}" if self.actor is None else str(self.actor.who)


@dataclass(kw_only=True, eq=False)
class EnginePool:
    """Data-parallel engines, all alike. May be used from any number of threads."""

    spec: TrainingEngineSpec
    start_actor: Callable[[int], Actor]
    """Starts the actor of the engine with this index, in its place."""
    hosts: Sequence[str]
    """The address of the node of each engine's actor; as many as there are engines."""
    max_restarts: int
    """How many engines that died are replaced, in the whole run."""
    start_timeout_s: float
    """Seconds that an engine may take to start."""
    call_timeout_s: float
    """Seconds that one call may take."""
    hang_timeout_s: float = 600.0
    """Seconds within which an engine that is frozen (stopped, or stuck in a C call) is found and replaced."""
    on_event: OnEvent = lambda _, __, ___: None
    on_change: Callable[[], None] = lambda: None
    """Called when processes were replaced."""
    startup_slot: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a replacement starts; waits until it may, which is when the trainer has freed the device."""
    healer: Callable[[RunningEngine], None] | None = None
    """Brings weights to an engine that waits for them, if that can be done now."""
    restarts: int = field(default=0, init=False)
    """Deaths so far."""
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()), init=False)
    """Notified whenever an engine's state changes."""

    _engines: list[RunningEngine] = field(default_factory=list, init=False)
    _request_limits: Limits | None = field(default=None, init=False)
    _have_weights: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _replacing: list[threading.Thread] = field(default_factory=list, init=False)

    # -- Start and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all engines in parallel.

        Raises:
            ValueError: what the first of them refuses.
            RemoteError: one did not start.
        """
        self._engines = [RunningEngine(index=index, actor=None, host=host) for index, host in enumerate(self.hosts)]
        errors: list[BaseException] = []
        _in_parallel(lambda engine: self._make(engine, (), errors), self._engines)
        if errors:
            self.close()
            raise errors[0]
        self._request_limits = self._engines[0].info().limits

    def close(self) -> None:
        """End all engines and any replacement that is starting; a second time does nothing."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()

        def close(engine: RunningEngine) -> None:
            with self.changed:
                engine.state, actor = "gone", engine.actor
            if actor is not None:
                actor.close()
            _end_leftovers(engine)

        _in_parallel(close, self._engines)
        deadline = time.monotonic() + CLOSE_GRACE_S
        for thread in self._replacing:  # these have no actor yet, and kill the one they get
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def closed(self) -> bool:
        """Whether they are ended, and no engine is started any more."""
        return self._closed

    # -- State --------------------------------------------------------------------------------------------------------

    def all(self) -> tuple[RunningEngine, ...]:
        """All engines by index, in whatever state."""
        with self.changed:
            return tuple(self._engines)

    def serving(self) -> tuple[RunningEngine, ...]:
        """The engines that can generate; raises what `require_healthy` does."""
        with self.changed:
            self.require_healthy()
            return tuple(engine for engine in self._engines if engine.state == "serving")

    def require_weights(self) -> Limits:
        """The limits of requests, once a refit has been committed."""
        if not self._have_weights or self._request_limits is None:
            raise Refusal("the engines have no weights yet: no refit has been committed")
        return self._request_limits

    def settled(self) -> tuple[RunningEngine, ...]:
        """All engines, once none is starting; a refit begins with this.

        Raises:
            EngineDiedError: a replacement did not start in time; or as `require_healthy`.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._failure or self._closed or all(each.state != "starting" for each in self._engines),
                timeout=self.start_timeout_s,
            )
            self.require_healthy()
            starting = [str(engine) for engine in self._engines if engine.state == "starting"]
            if starting:
                limit = f"cluster.start_timeout_s={self.start_timeout_s:g}"
                raise EngineDiedError(f"{', '.join(starting)} did not restart within {limit}")
            return tuple(self._engines)

    def serve(self, engines: Sequence[RunningEngine]) -> None:
        """Note that `engines` have the committed weights from now on, and can generate."""
        with self.changed:
            self._have_weights = True
            for engine in engines:
                if engine in self._engines:
                    engine.state = "serving"
            self.changed.notify_all()

    def require_healthy(self) -> None:
        """Pass while every dead engine could be replaced.

        Raises:
            EngineDiedError: more died than are replaced; another error, if a replacement refuses to start.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Refusal("the engines are closed")

    # -- Death and replacement ----------------------------------------------------------------------------------------

    def lost(self, engine: RunningEngine, why: BaseException | str, *, owed: str) -> None:
        """Replace an engine that died; only the first report counts. `owed` tells what happens to its work."""
        with self.changed:
            if self._closed or engine not in self._engines or engine.state in ("starting", "gone"):
                return
            self.restarts += 1
            within_limit = self.restarts <= self.max_restarts
            if within_limit:
                replacement = RunningEngine(index=engine.index, actor=None, host=engine.host)
                self._engines[engine.index] = replacement
            else:
                engine.state = "gone"
                self._failure = EngineDiedError(
                    f"{engine} died ({_first_line(why)}): engines died {self.restarts} times in this run, and "
                    f"policy.generation.max_restarts={self.max_restarts} restarts are allowed; look into its "
                    f"log, allow more, or resume the run from its last checkpoint"
                )
            self.changed.notify_all()
        said = f"{engine} died: {_first_line(why)}"
        if not within_limit:
            self.on_event("engine_died", said, "the run ends")
            return
        self.on_event("engine_restarted", said, f"restarted, {self.restarts} of {self.max_restarts}; {owed}")
        thread = threading.Thread(
            target=self._replace, args=(engine, replacement), name=f"restarting {engine}", daemon=True
        )
        with self.changed:
            if begins := not self.closed:
                self._replacing = [*(each for each in self._replacing if each.is_alive()), thread]
                thread.start()
        if not begins:
            _end_leftovers(engine)

    def await_reply(self, engine: RunningEngine, pending: Pending) -> Any:
        """What a call of `engine` returns; while it takes, the engine is asked whether it is alive.

        Raises:
            RemoteDiedError: it died, or it is frozen and was therefore killed.
            RemoteError: as `Pending.result`.
        """
        until, look_s = time.monotonic() + self.call_timeout_s, self.hang_timeout_s / 2
        while not pending.done(within_s=min(look_s, until - time.monotonic())):
            if time.monotonic() >= until:
                raise pending.timed_out(self.call_timeout_s)
            if (why := self.frozen(engine, patience_s=look_s)) is not None:
                engine.process().kill_on_its_node()
                raise died(why, who=engine.process().who, call=pending.call)
        return pending.result(timeout_s=60.0)

    def frozen(self, engine: RunningEngine, *, patience_s: float) -> str | None:
        """Why an engine at work will never answer, or None if it answers that it lives."""
        try:
            why: str | None = engine.process().call("alive", timeout_s=patience_s)
        except RemoteTimeoutError:
            return f"it is frozen: for {patience_s:g} seconds it has not even answered whether it is alive"
        except RemoteDiedError as error:
            return error.how
        return why

    def await_call(self, engine: RunningEngine, pending: Pending) -> None:
        """Wait for a call of `engine`; if it died, replace it. Other errors are raised."""
        try:
            pending.result(timeout_s=self.call_timeout_s)
        except RemoteDiedError as error:
            self.lost(engine, error, owed="it had no work")

    def is_dead(self, engine: RunningEngine) -> bool:
        """Whether it, or one of its processes, is gone or does not answer; if so, it is replaced."""
        try:
            why = engine.process().call("alive", timeout_s=60.0)
        except RemoteError as error:
            why = str(error)
        if why is not None:
            self.lost(engine, why, owed="its replacement joins the refit")
        return why is not None

    def fail(self, error: BaseException) -> None:
        """Raise `error` in whatever uses the pool next."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def _replace(self, old: RunningEngine, new: RunningEngine) -> None:
        try:
            old.process().kill_on_its_node()
            errors: list[BaseException] = []
            with self.startup_slot():
                self._make(new, old.info().processes, errors)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the engine must get it
            errors = [error]
        if self._closed:
            _end_leftovers(old)
            return
        if errors:
            self.fail(errors[0])
            return
        self.on_change()
        if self.healer is not None:
            self.healer(new)

    def _make(self, engine: RunningEngine, leftovers: Sequence[ChildProcess], errors: list[BaseException]) -> None:
        limit_s = self.start_timeout_s
        deadline = time.monotonic() + limit_s
        try:
            if self.closed:
                return
            actor = self.start_actor(engine.index)
            with self.changed:
                engine.actor, closed = actor, self._closed
            if closed:
                actor.kill()
                return
            actor.make(EngineWorker, self.spec, host=engine.host, leftovers=tuple(leftovers), timeout_s=limit_s)
            engine.started = actor.call("info", timeout_s=max(1.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that started this one
            errors.append(error)
            return
        with self.changed:
            engine.state = "gone" if self._closed else "waiting"
            self.changed.notify_all()


def _in_parallel(call: Callable[[RunningEngine], None], engines: Sequence[RunningEngine]) -> None:
    threads = [threading.Thread(target=call, args=(engine,), daemon=True) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_leftovers(engine: RunningEngine) -> None:
    """Kill what an engine of this node had started, if it died and no replacement has done so."""
    if engine.host == LOOPBACK and engine.started is not None:
        for process in engine.started.processes:
            process.kill()


def _first_line(why: BaseException | str) -> str:
    return why.how if isinstance(why, RemoteDiedError) else str(why).splitlines()[0]
