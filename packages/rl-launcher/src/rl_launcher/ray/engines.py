"""The engines of a run: started together, and replaced when they die. Knows neither prompts nor weights.

An engine is always in one of these states:

    starting   its process is being made
    waiting    it is there, and has no weights yet
    serving    it has the weights that were last committed
    gone       it died, and is not replaced any more

What dies is started again at once, in a thread; who brings the weights is told (`healer`), and if he can he brings them
at once. More deaths than the recipe allows are an error to whoever asks next.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from rl_generation import TrainingEngineSpec
from rl_generation.requests import Limits
from rl_launcher.errors import Refusal, RestartableError
from rl_launcher.ray.engine_worker import Birth, EngineWorker, Process, end_process
from rl_launcher.ray.failures import RemoteDiedError, RemoteError
from rl_launcher.ray.remote_calls import Actor, Pending

__all__ = ["LOOPBACK", "EngineDiedError", "EngineGroup", "EngineLimits", "OnEvent", "RunningEngine", "quiet"]

LOOPBACK = "127.0.0.1"
"""The address of the only machine of a run that has one."""

CLOSE_GRACE_S = 10.0
"""Seconds that a group's end waits for a process that is being started to come up and be ended."""

OnEvent = Callable[[str, str, str], None]
"""Told what happened: a name, a sentence, and what is done about it."""


class EngineDiedError(RestartableError):
    """An engine died, and is not started again."""

    condition = "engine_died"
    weights_lost = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What a run bears of its engines."""

    max_restarts: int
    """Deaths in the whole run that are made good."""

    start_timeout_s: float
    """Seconds that an engine may take to start."""

    call_timeout_s: float
    """Seconds that one call may take."""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningEngine:
    """One engine, until it dies; what replaces it is another one of the same number."""

    index: int
    actor: Actor | None
    """None until its process is made."""

    host: str
    """Address of its machine."""

    state: Literal["starting", "waiting", "serving", "gone"] = "starting"
    birth: Birth | None = None
    """None while it starts."""

    def born(self) -> Birth:
        """What it said of itself."""
        assert self.birth is not None
        return self.birth

    def process(self) -> Actor:
        """The actor that it is in."""
        assert self.actor is not None
        return self.actor

    def __str__(self) -> str:
        """As a sentence names it."""
        return f"engine {self.index}" if self.actor is None else str(self.actor.who)


def quiet(_: str, __: str, ___: str) -> None:
    """Nobody is told."""


@dataclass(kw_only=True, eq=False)
class EngineGroup:
    """Data-parallel engines, all alike. May be used from any number of threads."""

    spec: TrainingEngineSpec
    start_actor: Callable[[int], Actor]
    """Makes the actor of an engine's number, in its place."""

    hosts: Sequence[str]
    """The address of each engine's machine; as many as there are engines."""

    limits: EngineLimits
    on_event: OnEvent = quiet
    on_change: Callable[[], None] = lambda: None
    """Called when processes were replaced."""

    room: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a replacement starts; waits until it may: until the trainer has given its memory away."""

    healer: Callable[[RunningEngine], None] | None = None
    """Brings weights to an engine that waits for them, if that can be done now."""

    restarts: int = field(default=0, init=False)
    """Deaths so far."""

    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()), init=False)
    """Notified whenever an engine's state changes."""

    _engines: list[RunningEngine] = field(default_factory=list, init=False)
    _request_limits: Limits | None = field(default=None, init=False)
    _fed: bool = field(default=False, init=False)
    _failure: BaseException | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _replacing: list[threading.Thread] = field(default_factory=list, init=False)

    # -- Life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all of them side by side.

        Raises:
            ValueError: what the first of them refuses.
            RemoteError: one did not start.
        """
        self._engines = [RunningEngine(index=index, actor=None, host=host) for index, host in enumerate(self.hosts)]
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=self._make, args=(engine, (), errors), daemon=True) for engine in self._engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.close()
            raise errors[0]
        self._request_limits = self._engines[0].born().limits

    def close(self) -> None:
        """End them all, and whoever is being started in the place of one; a second time does nothing."""
        with self.changed:
            if self._closed:
                return
            self._closed = True
            self.changed.notify_all()
        closing = [threading.Thread(target=self._close_one, args=(engine,), daemon=True) for engine in self._engines]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for thread in self._replacing:  # which have no actor yet, and end the one that comes
            thread.join(max(0.0, deadline - time.monotonic()))

    def _close_one(self, engine: RunningEngine) -> None:
        with self.changed:
            engine.state, actor = "gone", engine.actor
        if actor is not None:
            actor.close()
        _end_what_is_left(engine)

    @property
    def closed(self) -> bool:
        """Whether they are ended, and none is started any more."""
        return self._closed

    # -- Who is there ----------------------------------------------------------------------------------------------

    def all(self) -> tuple[RunningEngine, ...]:
        """By number, in whatever state."""
        with self.changed:
            return tuple(self._engines)

    def serving(self) -> tuple[RunningEngine, ...]:
        """Those that can be asked.

        Raises:
            EngineDiedError: more died than are replaced.
        """
        with self.changed:
            self.require_whole()
            return tuple(engine for engine in self._engines if engine.state == "serving")

    def require_weights(self) -> Limits:
        """What an engine can be asked for, once any of them had weights.

        Raises:
            Refusal: No refit has been committed yet.
        """
        if not self._fed or self._request_limits is None:
            raise Refusal("the engines have no weights yet: no refit has been committed")
        return self._request_limits

    def settled(self) -> tuple[RunningEngine, ...]:
        """All of them, once none is starting; what a refit begins with.

        Raises:
            EngineDiedError: more died than are replaced, or a new one did not start.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self._failure or self._closed or all(each.state != "starting" for each in self._engines),
                timeout=self.limits.start_timeout_s,
            )
            self.require_whole()
            starting = [str(engine) for engine in self._engines if engine.state == "starting"]
            if starting:
                limit = f"cluster.start_timeout_s={self.limits.start_timeout_s:g}"
                raise EngineDiedError(f"{', '.join(starting)} did not start again within {limit}")
            return tuple(self._engines)

    def serve(self, engines: Sequence[RunningEngine]) -> None:
        """From now on `engines` have the committed weights, and can be asked."""
        with self.changed:
            self._fed = True
            for engine in engines:
                if engine in self._engines:
                    engine.state = "serving"
            self.changed.notify_all()

    def require_whole(self) -> None:
        """Pass while every death could be made good.

        Raises:
            EngineDiedError: more died than are replaced; another error, where a new one refuses to start.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Refusal("the engines are closed")

    # -- Death -----------------------------------------------------------------------------------------------------

    def lost(self, engine: RunningEngine, why: BaseException | str, *, owed: str) -> None:
        """An engine died: replace it. `owed` says what becomes of what it was asked. The first to notice counts."""
        with self.changed:
            if self._closed or engine not in self._engines or engine.state in ("starting", "gone"):
                return
            self.restarts += 1
            whole = self.restarts <= self.limits.max_restarts
            if whole:
                replacement = RunningEngine(index=engine.index, actor=None, host=engine.host)
                self._engines[engine.index] = replacement
            else:
                engine.state = "gone"
                self._failure = EngineDiedError(
                    f"{engine} died ({_short(why)}), the {_ordinal(self.restarts)} death of an engine in this run, and "
                    f"policy.generation.max_restarts={self.limits.max_restarts} are made good; look into its log, "
                    f"allow more, or resume the run from its last checkpoint"
                )
            self.changed.notify_all()
        reaction = f"started again, {self.restarts} of {self.limits.max_restarts}; {owed}" if whole else "the run ends"
        self.on_event("engine_restarted" if whole else "engine_died", f"{engine} died: {_short(why)}", reaction)
        if whole:
            self._begin_replacing(engine, replacement)

    def waited(self, engine: RunningEngine, pending: Pending, *, timeout_s: float) -> None:
        """Wait for a call of `engine`; where it died, replace it.

        Raises:
            RemoteError: it failed otherwise.
        """
        try:
            pending.result(timeout_s=timeout_s)
        except RemoteDiedError as error:
            self.lost(engine, error, owed="it owes nothing")

    def failed(self, engine: RunningEngine) -> bool:
        """Whether it, or a process of its, is gone or does not answer; a look from outside."""
        try:
            why = engine.process().call("alive", timeout_s=60.0)
        except RemoteError as error:
            why = str(error)
        if why is not None:
            self.lost(engine, why, owed="it takes part in the refit anew")
        return why is not None

    def fail(self, error: BaseException) -> None:
        """Have whoever asks next raise `error`."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def _begin_replacing(self, old: RunningEngine, new: RunningEngine) -> None:
        thread = threading.Thread(target=self._replace, args=(old, new), name=f"healing {old}", daemon=True)
        with self.changed:
            if begins := not self._closed:
                self._replacing = [*(each for each in self._replacing if each.is_alive()), thread]
                thread.start()
        if not begins:
            _end_what_is_left(old)

    def _replace(self, old: RunningEngine, new: RunningEngine) -> None:
        try:
            old.process().kill()
            errors: list[BaseException] = []
            with self.room():
                self._make(new, old.born().processes, errors)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the engine must hear of it
            errors = [error]
        if self._closed:
            _end_what_is_left(old)
            return
        if errors:
            self.fail(errors[0])
            return
        self.on_change()
        if self.healer is not None:
            self.healer(new)

    def _make(self, engine: RunningEngine, leftovers: Sequence[Process], errors: list[BaseException]) -> None:
        limit_s = self.limits.start_timeout_s
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
            engine.birth = actor.call("born", timeout_s=max(1.0, deadline - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - raised again by who waits for this thread
            errors.append(error)
            return
        with self.changed:
            engine.state = "gone" if self._closed else "waiting"
            self.changed.notify_all()


def _end_what_is_left(engine: RunningEngine) -> None:
    """End what an engine of this machine started, where it died and no successor has done so."""
    if engine.host == LOOPBACK and engine.birth is not None:
        for process in engine.birth.processes:
            end_process(process)


def _short(why: BaseException | str) -> str:
    if isinstance(why, RemoteDiedError):
        return why.how
    return str(why).splitlines()[0]


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
