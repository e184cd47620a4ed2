"""An engine whose workers are ranks of the sink: the driver's end, `EngineSink`, and a worker's, `WorkerEnd`.

Each worker joins the rendezvous, receives the boxes of its own parameters, and verifies them, in a thread beside the
one that generates. What must happen in a worker's main thread, or while the engine is paused, it asks of the driver: it
posts what it wants, and waits; when all workers want the same, the driver makes one call of the engine. Weights and
their digests never pass the driver.

    survey     looks at the engine in its main thread, once for each source                 (vLLM traces its loader)
    ready      whether a commit can begin, before the parties decide
    commit     the driver pauses the engine, has all workers commit, drops caches, resumes
    ended      what became of the refit at this worker

What they say goes through the store of the rendezvous, as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import secrets
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, final
from urllib.parse import urlsplit

from rl_refit.config import RefitConfig
from rl_refit.contracts import WeightSource
from rl_refit.errors import (
    AbortedError,
    DeadlineError,
    RefitError,
    error_from_message,
    error_to_message,
)
from rl_refit.plan import RefitPlan
from rl_refit.rendezvous import Rendezvous
from rl_refit.staged import VersionedSink
from rl_refit.stores import BoundedStore, FileStore, in_thread
from rl_refit.transaction.liveness import Peers
from rl_refit.transports.stream import SlotStream

if TYPE_CHECKING:
    from rl_refit.refit import Refit, RefitReport

__all__ = ["Answer", "Driver", "Engine", "EngineSink", "InMainThread", "WorkerEnd", "answering"]

Answer = dict[str, Any]
T = TypeVar("T")
Method = TypeVar("Method", bound="Callable[..., Answer]")

_LONGEST_NAP_S = 2e-3
_PATIENCE_S = 0.05
_AFTERMATH_S = 10.0
"""How long the workers may take to learn that the trainer of their own driver gave up."""


class Engine(Protocol):
    """What a sink asks of an engine: a few blocking calls, made in the thread that calls the refit."""

    @property
    def num_ranks(self) -> int:
        """Workers that hold weights, each a rank of the sink."""

    def call(self, method: str, *args: object) -> list[Answer]:
        """Have the main thread of every worker run `method`; their answers in the order of their ranks."""

    def ready(self) -> None:
        """Pass if the engine can be paused now, or soon; raise why not."""

    def pause(self) -> None:
        """Stop generating, and forget what was cached."""

    def renew(self, version: str) -> None:
        """Forget what was cached under the old weights, and number what is generated from now on."""

    def drop_requests(self) -> None:
        """Abort what is frozen: it must not go on with weights that are torn."""

    def resume(self) -> None:
        """Generate again."""


class EngineSink(VersionedSink):
    """An engine of one or many workers as the sink of a `Refit`; each worker is a rank of the sink.

    The process that made the engine gives it to its `Refit`, which carries no weights here. With a `Rendezvous`, its
    `sink_rank` is that of the first worker, and `num_sinks` counts all workers of all engines; without one, the source
    is of this process, and the workers meet it on loopback.

    Args:
        engine: What the driver asks of it.
        timeout_s: Seconds that one call of the engine may take, and that a worker waits for the driver.
        options: What each worker's sink is made with, as plain data.
    """

    def __init__(self, engine: Engine, *, timeout_s: float, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._engine, self._timeout_s, self._options = engine, timeout_s, dict(options or {})
        self._token = secrets.token_hex(8)
        self._drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
        self._failure: str | None = None
        """How the last commit failed, as the driver saw it, which knows the worker; None if it did not."""
        self._notes: dict[str, Any] = {}
        self.pause_s = 0.0
        """Seconds for which the last commit paused the engine, without the wait for unfinished requests."""

    def surveyed(self, found: Sequence[Any]) -> None:
        """What the workers have found out of a source that they did not know, as their sinks say."""

    @property
    def num_ranks(self) -> int:
        """Workers of the engine: ranks of the sink."""
        return self._engine.num_ranks

    def poison(self, reason: str) -> None:
        """Refuse to be used until a refit succeeds; see `WeightSink`, as for the next two."""
        self._poison = self._notes["poison"] = reason

    def repeat(self) -> None:
        """Take the version that was just committed once more."""
        self._notes["repeat"] = True

    def rewind(self, version: int) -> None:
        """Take `version` next, or a later one."""
        self._notes["rewind"] = version

    def close(self) -> None:
        """Have the workers let go of what they hold for refits."""
        for driver in tuple(self._drivers):
            driver.close()
        self._drivers.clear()
        self._leave()

    def ask_workers(self, what: str, *args: object) -> list[Answer]:
        """Have the main thread of every worker do `what`; see `WorkerEnd.do`."""
        return self._engine.call("rl_refit", self._token, what, *args)

    # -- What a driver does for the workers -------------------------------------------------------------------------

    def _leave(self) -> None:
        """Have the workers leave the refits of all but the drivers that are left."""
        with contextlib.suppress(Exception):  # the engine may have ended before
            self.ask_workers("leave", [each.name for each in self._drivers])

    def _commit(self, driver: Driver) -> None:
        """Pause, have every worker commit, forget what was cached, resume.

        Raises:
            RefitError: The engine cannot be paused, and no worker touched anything; or the sink is poisoned.
        """
        self._engine.pause()
        paused_at, self._failure = time.monotonic(), None
        try:
            answers = self.ask_workers("run", driver.name)
            raise_errors(answers, phase="commit")
            self._engine.renew(str(answers[0]["done"]))
        except BaseException as error:
            self._poison = self._failure = f"the commit failed with {type(error).__name__}: {error}"
            try:
                self._engine.drop_requests()
                self._engine.resume()
            except Exception as another:  # noqa: BLE001  (the cause is what the caller must see)
                error.add_note(f"nor could the engine abort its requests: {type(another).__name__}: {another}")
            raise
        self._engine.resume()
        self.pause_s = time.monotonic() - paused_at

    def _note_end(self, said: Sequence[Mapping[str, Any]]) -> None:
        """What the workers say of themselves after a refit."""
        poisons = [each["poison"] for each in said if each["poison"]]
        if poisons:
            self._poison = self._failure or poisons[0]
        elif all("report" in each for each in said):
            self._poison = None
        if not self.poisoned:
            self.version = said[0]["version"]


def raise_errors(answers: Sequence[Answer], *, phase: str = "prepare") -> None:
    """Raise what workers answered that went wrong."""
    failed = [answer for answer in answers if "error" in answer]
    if failed:
        if failed[0]["message"]["kind"] == "CoverageError":
            raise error_from_message(failed[0]["message"])
        error = RefitError("; ".join(f"worker {each['rank']}: {each['error']}" for each in failed), phase=phase)
        error.add_note(failed[0].get("traceback", ""))
        raise error


def answering(method: Method) -> Method:
    """Whatever a worker's method raises becomes its answer.

    An exception in one of several workers would leave the answers of the others in an engine's queues, and the next
    call would take them for its own.
    """

    @functools.wraps(method)
    def answer(self: Any, *args: object) -> Answer:
        rank = getattr(self, "rl_refit_rank", self.rank)  # an engine's own count may begin anew in each replica
        try:
            return {"rank": rank, **method(self, *args)}
        except Exception as error:  # noqa: BLE001  (the driver raises it)
            message = error_to_message(error, party=f"worker {rank}")
            text = f"{type(error).__name__}: {error}"
            return {"rank": rank, "error": text, "message": message, "traceback": traceback.format_exc()}

    return cast("Method", answer)


# -- The driver ------------------------------------------------------------------------------------------------------


@final
class Driver:
    """The refits of one `Refit` at the driver of an engine, whose own source is a party beside the workers."""

    def __init__(
        self,
        sink: EngineSink,
        source: WeightSource | None,
        *,
        transport: Any,
        rendezvous: Rendezvous | None,
        config: RefitConfig,
    ) -> None:
        self._sink, self._source, self._transport, self._config = sink, source, transport, config
        self._given = rendezvous
        self._meeting: Rendezvous | None = None
        self._store: BoundedStore | None = None
        self._refit: Refit | None = None
        """Of this process's own source."""
        self._handled: dict[int, int] = {}
        self._receiving = False
        self._first_rank = 0
        self._peers: Peers | None = None
        self.name = f"{'rl-refit' if rendezvous is None else rendezvous.name} {secrets.token_hex(4)}"
        sink._drivers.add(self)  # noqa: SLF001  (two halves of one class, as below)

    def plan(self) -> RefitPlan:
        """See `Refit.plan`; the workers plan too, and wait for the first refit then."""
        refit = self._own_refit()
        return refit.plan if refit.is_planned else self._drive(refit, lambda: refit.plan, ends=False)[0]

    def refit(self, version: int) -> RefitReport:
        """Bring this process's own source into the engine, and do meanwhile what the workers ask for."""
        refit = self._own_refit()
        report, said = self._drive(refit, lambda: refit(version=version), ends=True)
        return _add_unreadable(report, said or ())

    def receive(self, timeout_s: float) -> RefitReport:
        """Have the workers wait for the trainer's refit and take part, and do what they ask for.

        Raises:
            DeadlineError: None began within `timeout_s`.
            RefitError: What the first that failed reports.
        """
        from rl_refit.refit import RefitReport

        self._join()
        self._begin_receiving(timeout_s)
        said = self._attend_until(lambda: False)
        assert said is not None
        self._sink._note_end(said)  # noqa: SLF001
        failed = [each["error"] for each in said if "error" in each]
        if failed:
            own = [each for each in failed if " gave up in " not in each["text"] and each["kind"] != "AbortedError"]
            message = (own or failed)[0]  # before what workers have heard of others
            if message["kind"] == "DeadlineError" and "no refit began within" in message["text"]:
                raise DeadlineError(message["text"], phase="prepare", peer=message["peer"], seconds=message["seconds"])
            raise error_from_message(message)
        report = said[0]["report"]
        return _add_unreadable(RefitReport(**{**report, "kept": tuple(report["kept"])}), said)

    def _own_refit(self) -> Refit:
        from rl_refit.refit import Refit

        if self._source is None:
            raise RefitError("the driver of an engine carries no weights, and has no plan: ask the trainer's Refit")
        if self._refit is None:
            self._join()
            assert self._meeting is not None
            meeting, given = self._meeting, self._given
            rendezvous = Rendezvous(
                meeting.clone(),
                num_sources=meeting.num_sources,
                num_sinks=meeting.num_sinks,
                source_rank=0 if given is None else given.source_rank,
                hosts=False,
                liveness_s=meeting.liveness_s,
                name=meeting.name,
            )
            self._refit = Refit(self._source, transport=self._transport, rendezvous=rendezvous, **asdict(self._config))
        return self._refit

    def _drive(self, refit: Refit, run: Callable[[], T], *, ends: bool) -> tuple[T, list[dict[str, Any]] | None]:
        """What `run` returns, a call of `refit`, and what the workers say of theirs; they are attended to meanwhile.

        Args:
            refit: Of this process's own source.
            run: Works in another thread.
            ends: Whether the workers' part ends with it; a plan leaves them waiting for the first refit.
        """
        refit.interruption = None
        self._begin_receiving(math.inf)
        working = in_thread(run, name="source")
        said: list[dict[str, Any]] | None = None
        try:
            said = self._attend_until(working.done)
            wait([working])
            if said is None and working.exception() is not None:  # they have yet to learn of it
                gone = time.monotonic() + _AFTERMATH_S
                said = self._attend_until(lambda: time.monotonic() > gone)
            elif said is None and ends:  # all have committed, and will say so
                said = self._attend_until(lambda: False)
        except BaseException as error:
            refit.interruption = error
            wait([working])
            gone = time.monotonic() + _AFTERMATH_S
            with contextlib.suppress(Exception):
                said = said or self._attend_until(lambda: time.monotonic() > gone)
            raise
        if said is not None:
            self._sink._note_end(said)  # noqa: SLF001
        return working.result(), said

    def close(self) -> None:
        """Have the workers leave, and wait a little until whoever reads the store knows how the last refit ended."""
        if self._store is None:
            return
        self.let_go()
        self._sink._drivers.discard(self)  # noqa: SLF001
        self._sink._leave()  # noqa: SLF001

    def let_go(self) -> None:
        """Close this end alone; the workers leave when the next `Refit` joins them."""
        if self._refit is not None:
            self._refit.close()
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # -- Their parts ------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._store is not None:
            return
        sink, given = self._sink, self._given
        if given is None:
            ranks = sink.num_ranks
            self._meeting = Rendezvous("tcp://127.0.0.1:0", num_sources=1, num_sinks=ranks, source_rank=0, hosts=True)
        else:
            self._meeting, self._first_rank = given, given.sink_rank or 0
            if self._first_rank + sink.num_ranks > given.num_sinks:
                raise ValueError(
                    f"the engine has {sink.num_ranks} workers, each a rank of the sink, and sink_rank="
                    f"{self._first_rank} of num_sinks={given.num_sinks} leaves no place for them: num_sinks counts the "
                    f"workers of all engines, and sink_rank is that of an engine's first"
                )
        meeting = self._meeting
        store = meeting.connect()
        if "://" not in meeting.address:
            raise RefitError(
                f"workers of an engine cannot join through a {meeting.address} of this process; give the rendezvous an "
                f"address, such as tcp://host:port",
                phase="prepare",
            )
        if meeting.address.startswith("file:"):  # one that does not count among those after whom the file is deleted
            store = FileStore(urlsplit(meeting.address).path, -1)
        message = {
            "driver": self.name,
            "address": meeting.address,
            "numbers": {"num_sources": meeting.num_sources, "num_sinks": meeting.num_sinks},
            "first_rank": self._first_rank,
            "name": meeting.name,
            "liveness_s": meeting.liveness_s,
            "config": asdict(self._config),
            "transport": self._transport.options,
            "timeout_s": sink._timeout_s,  # noqa: SLF001
            "options": sink._options,  # noqa: SLF001
            "host": socket.gethostname(),
        }
        living = [each.name for each in sink._drivers]  # noqa: SLF001
        raise_errors(sink.ask_workers("join", message, living))
        self._store = meeting.bounded(meeting.name, store=store)

    def _begin_receiving(self, timeout_s: float) -> None:
        if not self._receiving:
            sink = self._sink
            notes, sink._notes = sink._notes, {}  # noqa: SLF001
            timeout = None if math.isinf(timeout_s) else timeout_s
            raise_errors(sink.ask_workers("receive", self.name, timeout, notes))
            self._receiving = True

    def _attend_until(self, is_over: Callable[[], bool]) -> list[dict[str, Any]] | None:
        """Do what the workers want until the refit has ended at all of them, and say so, or `is_over` without that."""
        nap_s = 1e-4
        while True:
            said, moved = self._attend()
            if said is not None or is_over():
                return said
            nap_s = 1e-4 if moved else min(1.2 * nap_s, _LONGEST_NAP_S)
            time.sleep(nap_s)

    def _attend(self) -> tuple[list[dict[str, Any]] | None, bool]:
        """Do what all workers want, if they do; what they say of the refit, once it has ended at all of them."""
        store = self._store
        if store is None:
            raise RefitError("this Refit is closed; make a new one")
        ranks = range(self._first_rank, self._first_rank + self._sink.num_ranks)
        self._look_after(store, ranks)
        said: dict[int, tuple[int, str, Any]] = {}
        for rank in ranks:
            said[rank] = number, what, _ = store.read(f"worker {rank}") or (0, "", None)
            if number <= self._handled.get(rank, 0):
                return None, False
        wanted = {what for _, what, _ in said.values()}
        if wanted == {"ended"}:
            self._handled |= {rank: number for rank, (number, _, _) in said.items()}
            self._receiving = False
            return [payload for _, _, payload in said.values()], True
        error: dict[str, Any] | None = None
        try:
            self._do(wanted)
        except Exception as failure:  # noqa: BLE001  (it is the workers' to raise, and to tell everybody)
            where = "the engine's driver"
            error = error_to_message(failure, party=f"driver of sink {self._first_rank}", where=where)
        for rank, (number, what, _) in said.items():
            if what != "ended":
                self._handled[rank] = number
                store.write(f"answer {rank}", [number, error])
        return None, True

    def _do(self, wanted: set[str]) -> None:
        if len(wanted) > 1:
            raise AbortedError(f"the workers of the engine are not at one: {sorted(wanted)}")
        (what,) = wanted
        if what == "survey":  # whoever finds the source wanting raises it itself, and tells everybody
            answers = self._sink.ask_workers("run", self.name)
            self._sink.surveyed([answer["done"] for answer in answers if "done" in answer])
        elif what == "ready":
            self._sink._engine.ready()  # noqa: SLF001
        else:
            assert what == "commit"
            self._sink._commit(self)  # noqa: SLF001

    def _look_after(self, store: BoundedStore, ranks: range) -> None:
        """See that the workers live, as soon as they have said who they are."""
        if self._peers is None:
            parties = [f"sink {rank}" for rank in ranks]
            processes = {party: store.read(f"party/{party}") for party in parties}
            if None in processes.values():
                return
            assert self._meeting is not None
            self._peers = Peers(store, processes, listen_to=(), liveness_s=self._meeting.liveness_s)
        self._peers.check()


def _add_unreadable(report: RefitReport, said: Sequence[Mapping[str, Any]]) -> RefitReport:
    """What no worker can read back from its engine belongs into the driver's report."""
    names = (name for each in said for name in each["report"]["unreadable"])
    return replace(report, unreadable=tuple(dict.fromkeys(names)))


# -- A worker --------------------------------------------------------------------------------------------------------


@final
class _Seat:
    """A worker in the refits of one `Refit` of the driver."""

    def __init__(self, end: WorkerEnd, message: Mapping[str, Any], *, rank: int) -> None:
        from rl_refit.refit import Refit

        self._end, self._message = end, message
        self._sink_rank = message["first_rank"] + rank
        transport = dict(message["transport"])
        if transport.get("host") is not None and socket.gethostname() != message["host"]:
            transport["host"] = _own_address(message["address"])
        self._meeting = Rendezvous(
            message["address"],
            **message["numbers"],
            sink_rank=self._sink_rank,
            hosts=False,
            liveness_s=message["liveness_s"],
            name=message["name"],
        )
        self.refit = Refit(
            sink=end.sink, transport=SlotStream(**transport), rendezvous=self._meeting, **message["config"]
        )
        self._store: BoundedStore | None = None
        self._numbers = itertools.count(1)
        self.asked: tuple[Callable[[], object], Future[object]] | None = None
        """What this thread wants the main thread to do, and what came of it."""

    def receive(self, timeout_s: float | None) -> None:
        """In a thread of its own: take part in the next refit, and say what became of it."""
        end: dict[str, Any] = {}
        with self._end.busy:
            self._end.seat = self
            try:
                report = self.refit.receive(timeout_s=timeout_s)
                end["report"] = {**asdict(report), "seconds": dict(report.seconds)}
            except BaseException as error:  # noqa: BLE001  (the driver raises it)
                end["error"] = error_to_message(error, party=f"sink {self._sink_rank}")
            sink = self._end.sink
            end |= {"version": sink.version, "poison": sink.poison_reason}
        with contextlib.suppress(RefitError):  # the store is gone, and the driver with it, or it sees for itself
            self._say("ended", end)

    def ask(self, what: str, job: Callable[[], object]) -> object:
        """See `WorkerEnd.ask`."""
        done: Future[object] = Future()
        self.asked = job, done
        try:
            number = self._say(what, None)
            until, nap_s = time.monotonic() + self._message["timeout_s"], 1e-4
            key, looked = f"answer {self._sink_rank}", time.monotonic()
            assert self._store is not None
            while True:
                answered, error = self._store.read(key) or (0, None)
                if answered == number:
                    break
                if not done.done() and time.monotonic() > until:
                    raise DeadlineError(
                        f"the engine's driver did not answer within timeout_s={self._message['timeout_s']:g}: is it in "
                        f"receive(), or its call of the refit?",
                        seconds=self._message["timeout_s"],
                    )
                if what != "commit" and time.monotonic() - looked > _PATIENCE_S:
                    looked = time.monotonic()
                    self.refit.look_around()
                time.sleep(nap_s)
                nap_s = min(1.2 * nap_s, _LONGEST_NAP_S)
        finally:
            self.asked = None
        if done.done():
            done.result()  # raises what the main thread met
        if error is not None:
            raise error_from_message(error)
        return done.result() if done.done() else None

    def close(self) -> None:
        with contextlib.suppress(RefitError, RuntimeError):
            self.refit.close()
        if self._store is not None:
            self._store.close()

    def _say(self, what: str, payload: object) -> int:
        if self._store is None:  # a connection of its own: the others are their threads'
            self._store = self._meeting.bounded(self._meeting.name, store=self._meeting.clone())
        number = next(self._numbers)
        self._store.write(f"worker {self._sink_rank}", [number, what, payload])
        return number


class WorkerEnd:
    """A worker's end of an engine's refits: the driver calls `rl_refit` in each worker, which hands it to `do`.

    Args:
        rank: Of the worker among those of its engine.
        make_sink: Makes the worker's sink, anew for each sink of the driver's. It also has `version` and
            `poison_reason`.
    """

    def __init__(self, rank: int, make_sink: Callable[[WorkerEnd], Any]) -> None:
        self.rank, self._make_sink = rank, make_sink
        self._token = ""
        self.options: dict[str, Any] = {}
        """Of the driver's sink."""
        self._seats: dict[str, _Seat] = {}
        self.busy = threading.Lock()
        self.seat: _Seat | None = None
        self.sink: Any = None

    @answering
    def do(self, token: str, what: str, *args: Any) -> Answer:
        """What the driver's sink `token` asks of its workers' main threads: "join", "receive", "run" or "leave".

        A new token takes the engine from the one before, with a sink of its own.
        """
        if what == "join":
            self._join(token, *args)
        elif token != self._token:
            if what != "leave":
                raise RefitError("another sink has taken this engine since this one did; make a new sink")
        elif what == "leave":
            self._leave(*args)
        elif what == "receive":
            self._receive(*args)
        else:
            assert what == "run"
            return {"done": self._run(*args)}
        return {}

    def _join(self, token: str, message: Mapping[str, Any], living: Sequence[str]) -> None:
        """Take part in the refits of a `Refit` of the driver's; those that are not among `living` are left."""
        self._leave(living if token == self._token else ())
        if token != self._token:
            self.options = message["options"]
            self.sink, self._token = self._make_sink(self), token
        self._seats[message["driver"]] = _Seat(self, message, rank=self.rank)

    def _receive(self, driver: str, timeout_s: float | None, notes: Mapping[str, Any]) -> None:
        """Wait for the trainer in a thread, and take part; at most one at a time."""
        sink = self.sink
        if "poison" in notes:
            sink.poison(notes["poison"])
        if notes.get("repeat"):
            sink.repeat()
        if "rewind" in notes:
            sink.rewind(notes["rewind"])
        receive = self._seats[driver].receive
        threading.Thread(target=receive, args=(timeout_s,), daemon=True, name="rl-refit worker").start()

    def _run(self, driver: str) -> object:
        """Do what the worker's own thread asked for; what that raises, the thread raises too."""
        asked = self._seats[driver].asked
        if asked is None:
            raise RefitError("this worker has given up meanwhile, and asks for nothing")
        job, done = asked
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
            raise
        return done.result()

    def ask(self, what: str, job: Callable[[], object] = lambda: None) -> Any:
        """In the worker's thread: tell the driver that this worker wants `what`, and wait until it has answered.

        Args:
            what: "survey", "ready" or "commit".
            job: What the main thread is to do when the driver says "run", of a survey or a commit.

        Raises:
            RefitError: What the driver answers, or it did not within its `timeout_s`.
        """
        assert self.seat is not None
        return self.seat.ask(what, job)

    def _leave(self, living: Sequence[str]) -> None:
        """Leave all `Refit`s of the driver's but `living`."""
        for name in [name for name in self._seats if name not in living]:
            self._seats.pop(name).close()


@final
class InMainThread:
    """A worker's `sink`, whose commit its main thread does while the engine is paused: a `WeightSink`, as `sink` is."""

    def __init__(self, sink: Any, end: WorkerEnd) -> None:
        self._sink, self._end = sink, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def ready(self, version: int) -> None:
        """Ask the engine too."""
        self._sink.ready(version)
        self._end.ask("ready")

    def commit(self, version: int) -> None:
        """Commit as soon as the driver has paused the engine."""
        committed = False

        def work() -> int:
            nonlocal committed
            self._sink.commit(version)
            committed = True
            return version

        try:
            self._end.ask("commit", work)
        except BaseException as error:
            if committed:
                self._sink.poison(f"this worker has committed, and its engine has failed: {error}")
            raise


def _own_address(address: str) -> str:
    """The address of this machine that the host of the store sees."""
    parts = urlsplit(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((parts.hostname, parts.port))
        return str(probe.getsockname()[0])
