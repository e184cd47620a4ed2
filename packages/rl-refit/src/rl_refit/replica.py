"""`Replica`: an engine that joins whichever trainer is at an address, and takes part in refits under its name.

What the two sides write where they meet is described in `rl_refit.replicas`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, final
from urllib.parse import urlsplit

from rl_refit.config import RefitConfig
from rl_refit.contracts import WeightSink
from rl_refit.engine import EngineSink
from rl_refit.errors import DeadlineError, PeerError, RefitError
from rl_refit.refit import LONGEST_NAP_S, Refit, RefitReport
from rl_refit.rendezvous import Rendezvous
from rl_refit.stores import BoundedStore, listens
from rl_refit.transaction.liveness import Heartbeat, Peers, is_there, this_process
from rl_refit.transports.base import PATIENCE_S, Transport
from rl_refit.transports.stream import SlotStream

__all__ = ["TRAINER_NAME", "Replica", "host_and_port"]

TRAINER_NAME = "rl-refit replicas"
"""Of the replicas of a trainer, where its address serves no others."""

_DEFAULTS = RefitConfig()
_OPEN, _GIVEN, _WITHDRAWN = "open", "given", "withdrawn"
"""What became of a newcomer's request to a peer: giver or newcomer decides, by compare-and-set."""
_GIVEN_UP: dict[str, Any] = {}
"""Instead of an invitation that rank 0 has given up."""


def host_and_port(address: str) -> tuple[str, int]:
    """Of "tcp://host:port".

    Raises:
        ValueError: It is of another kind.
    """
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise ValueError(f"address={address!r} is not tcp://host:port, where replicas and their trainer meet")
    return parts.hostname, parts.port


def _patient(liveness_s: float) -> Callable[..., Rendezvous]:
    return functools.partial(Rendezvous, timeout_s=liveness_s, liveness_s=liveness_s)


@final
class Replica:
    """One replica of an engine, for as long as it lives: it joins whichever trainer is at an address.

    Every rank of the engine makes one; the driver of an `EngineSink` makes one for all its workers.

    Args:
        sink: Where weights go: this process's rank. Its `version`, if it has one, is what the trainer is told.
        name: Of the replica, kept for its life and by whatever replaces it. If another process takes the name, this one
            is told.
        trainer: The address of the `Replicas`.
        address: "tcp://host:port" where the trainer and the ranks of this replica meet, at an address that they reach;
            rank 0 hosts a store there. Port 0 is a free one, for a replica of one process.
        rank: This process's, of the replica.
        num_ranks: Of the replica; the workers of an `EngineSink` are counted by themselves.
        transport: Makes the way of the bytes; see `Replicas`.
        in_turn: Runs each refit, which is the function that it is given: for an engine of one thread, between two of
            that thread's steps. `receive` waits for refits beside it.
        from_peers: Whether a replica that lacks the committed version takes it from a living one that has it, without
            the trainer, which may be training; where that one can give it, as a `ModuleSink` can. A replica gives while
            it is in `receive`, and serves on. The trainer's refits come first.
        liveness_s: See `Replicas`. Also how long `receive()` looks for a trainer that is not there.
        trainer_name: `name` of the `Replicas`.
        bucket_bytes: See `RefitConfig`, as for the arguments that follow.
        buckets: Slots of each ring.
        deadline_s: Seconds a phase may take.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        sink: WeightSink | EngineSink,
        *,
        name: str,
        trainer: str,
        address: str = "tcp://127.0.0.1:0",
        rank: int = 0,
        num_ranks: int = 1,
        transport: Callable[[], Transport] = SlotStream,
        in_turn: Callable[[Callable[[], Any]], Any] = lambda refit: refit(),
        from_peers: bool = True,
        liveness_s: float = 30.0,
        trainer_name: str = TRAINER_NAME,
        bucket_bytes: int = _DEFAULTS.bucket_bytes,
        buckets: int = _DEFAULTS.buckets,
        deadline_s: float = _DEFAULTS.deadline_s,
    ) -> None:
        self._config = RefitConfig(bucket_bytes=bucket_bytes, buckets=buckets, deadline_s=deadline_s)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank} is no rank of num_ranks={num_ranks}")
        if isinstance(sink, EngineSink) and num_ranks != 1:
            raise ValueError("the workers of an EngineSink are counted by themselves: leave num_ranks out")
        if host_and_port(address)[1] == 0 and num_ranks > 1:
            raise ValueError(f"address={address!r}: all ranks of a replica give the same port, and not 0")
        self.name = name
        self._sink, self._transport, self._liveness_s = sink, transport, liveness_s
        self._in_turn, self._rendezvous = in_turn, _patient(liveness_s)
        self._rank, self._address = rank, address
        self._num_ranks = sink.num_ranks if isinstance(sink, EngineSink) else num_ranks
        self._meeting: Rendezvous | None = None
        self._store: BoundedStore | None = None
        """Of this replica, hosted by its rank 0."""
        self._taken = _GIVEN_UP
        """The last invitation that this rank has taken."""
        self._refit: Refit | None = None
        self._session = ""
        self._closed, self._busy = False, threading.Lock()
        self._trainer = None
        if rank == 0:
            self._trainer = _Trainer(
                trainer, trainer_name, sink=sink, place=self._place, liveness_s=liveness_s, from_peers=from_peers
            )

    def receive(self, *, timeout_s: float | None = None) -> RefitReport:
        """Wait for the trainer to refit this replica, and take part. Joins the trainer that is there.

        Whatever is raised, the next call joins again: the same trainer, or the one that has taken its address.

        Args:
            timeout_s: Seconds to wait for the refit to begin; None waits for as long as the trainer lives. 0 takes part
                if one has begun, for an engine that looks between two batches.

        Raises:
            DeadlineError: None began within `timeout_s`; the sink is as it was.
            PeerError: The trainer is dead, silent, has left, or is not there; or rank 0 of this replica is.
            RefitError: Another process has taken the name; or as for `Refit.receive`.
        """
        if not self._busy.acquire(blocking=False):
            raise RefitError("another thread is in receive() of this Replica; close() ends that")
        try:
            while (invitation := self._await_invitation(timeout_s)) is not None:
                if "gives" not in invitation:
                    report: RefitReport = self._in_turn(functools.partial(self._take_part, invitation))
                    return report
                self._in_turn(functools.partial(self._give, invitation))
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._busy.release()
        absence = f" ({self._absence})" if self._absence else ""  # this replica stays where it has joined
        raise DeadlineError(
            f"no refit began within timeout_s={timeout_s:g}{absence}; the sink is as it was",
            phase="prepare",
            peer="source 0",
            seconds=timeout_s or 0.0,
        )

    def close(self) -> None:
        """Leave; the trainer goes on without this replica, which may come back under its name. Ends a `receive`."""
        self._closed = True
        if (refit := self._refit) is not None:
            with contextlib.suppress(RefitError):
                refit.close()
        with self._busy:
            self._give_up(None)

    @property
    def _absence(self) -> str:
        return "" if self._trainer is None else self._trainer.absence

    def _await_invitation(self, timeout_s: float | None) -> dict[str, Any] | None:
        """What this rank is to take part in; None where nobody has said so within `timeout_s`."""
        self._require_open()
        store = self._connect()
        began, nap_s = time.monotonic(), 2e-4
        while (invitation := self._look(store)) is None:
            self._require_open()
            waited = time.monotonic() - began
            if timeout_s is None and self._absence and waited >= self._liveness_s:
                raise PeerError(f"{self._absence}; the sink is as it was", peer="source 0")
            if timeout_s is not None and waited >= timeout_s:
                return None
            time.sleep(nap_s)
            nap_s = min(1.1 * nap_s, LONGEST_NAP_S)
        return invitation

    def _require_open(self) -> None:
        if self._closed:
            raise RefitError("this Replica is closed; make a new one")

    def _connect(self) -> BoundedStore:
        if self._store is None:
            self._meeting = self._rendezvous(
                self._address, num_sources=1, num_sinks=self._num_ranks, sink_rank=self._rank
            )
            self._meeting.host = f"rank 0 of replica {self.name}"
            self._store = self._meeting.bounded("replica")
            self._address = self._meeting.address
        return self._store

    def _place(self) -> dict[str, Any]:
        """What others are told of this replica."""
        return {"name": self.name, "address": self._address, "num_ranks": self._num_ranks}

    def _look(self, store: BoundedStore) -> dict[str, Any] | None:
        """What this rank is to take part in and has not yet; rank 0 finds it, and hands it to the others."""
        if self._trainer is None:
            invitation = store.read("invitation")
        elif (invitation := self._trainer.look()) is not None:
            store.write("invitation", invitation)
        if invitation in (None, _GIVEN_UP, self._taken):
            return None
        self._taken = invitation
        return self._taken

    def _take_part(self, invitation: Mapping[str, Any]) -> RefitReport:
        if self._refit is None or self._session != invitation["session"]:
            self._close_refit()
            assert self._meeting is not None
            rendezvous = self._rendezvous(
                self._meeting.clone(),
                num_sources=invitation["num_sources"],
                num_sinks=self._num_ranks,
                sink_rank=self._rank,
                hosts=self._rank == 0,
                name=invitation["session"],
            )
            self._session = invitation["session"]
            self._refit = Refit(
                sink=self._sink, transport=self._transport(), rendezvous=rendezvous, **asdict(self._config)
            )
            self._refit.look_also = functools.partial(self._look_also, invitation.get("peer"))
        if invitation["rewind"]:
            self._sink.rewind(invitation["version"])
        patience_s = self._liveness_s if "peer" in invitation else self._config.deadline_s
        report = self._refit.receive(timeout_s=patience_s)
        if "peer" in invitation:
            self._close_refit()
            if self._trainer is not None:
                self._trainer.tell(report.version)
        return report

    def _look_also(self, peer: Mapping[str, Any] | None) -> None:
        """While this rank is in a refit: see that nobody has given it up: the trainer, a peer that gives, rank 0."""
        if peer is not None and not is_there(peer["process"]):
            raise PeerError(f"replica {peer['name']}, which gave its weights, is dead: its process is gone")
        if self._trainer is not None:
            if peer is None:
                self._trainer.check(in_refit=True)
        elif self._store is not None and self._store.read("invitation") != self._taken:
            raise PeerError(f"rank 0 of replica {self.name} gave this refit up; its errors say why", peer="sink 0")

    def _give(self, request: Mapping[str, Any]) -> None:
        """Be the source of a newcomer's refit; what goes wrong is raised there."""
        sink: Any = self._sink
        rendezvous = self._rendezvous(
            request["address"],
            num_sources=self._num_ranks,
            num_sinks=request["num_ranks"],
            source_rank=self._rank,
            hosts=False,
            name=request["session"],
        )
        refit = Refit(sink.weights(), transport=self._transport(), rendezvous=rendezvous, **asdict(self._config))
        with contextlib.suppress(RefitError):
            refit(version=request["gives"])
        with contextlib.suppress(RefitError):
            refit.close()

    def _give_up(self, error: BaseException | None) -> None:
        """Leave this refit, tell the other ranks, and join the trainer again, if that lives, with what is held now."""
        self._close_refit()
        store, lost = self._store, isinstance(error, PeerError) and self._trainer is None
        with contextlib.suppress(RefitError):
            if self._trainer is not None:
                if store is not None:
                    store.write("invitation", _GIVEN_UP)
                if self._closed:
                    self._trainer.leave()
                else:
                    self._trainer.join_again()
        if store is not None and (self._closed or lost):
            store.close()
            self._store = None

    def _close_refit(self) -> None:
        refit, self._refit = self._refit, None
        if refit is not None:
            with contextlib.suppress(RefitError):
                refit.close()


@final
class _Trainer:
    """The store at the trainer's address, as rank 0 of a replica uses it: to join, to be invited, and to find peers.

    `place` says what others are told of this replica, beside the version that its `sink` has.
    """

    def __init__(
        self,
        address: str,
        name: str,
        *,
        sink: WeightSink | EngineSink,
        place: Callable[[], dict[str, Any]],
        liveness_s: float,
        from_peers: bool,
    ) -> None:
        host_and_port(address)
        self._address, self._name, self._sink, self._place = address, name, sink, place
        self._liveness_s, self._from_peers = liveness_s, from_peers
        self._identity = uuid.uuid4().hex
        self._store: BoundedStore | None = None
        self._peers: Peers | None = None
        self._heartbeat: Heartbeat | None = None
        self._number: int | None = None
        self._call = 0
        self._looked = self._looked_for_peers = 0.0
        self._usurped: str | None = None
        self._asked: tuple[str, dict[str, Any], float] | None = None
        """Of a peer: the key of its answer, how to take part if it gives, and until when to wait for it."""
        self._asked_before: set[tuple[int, str]] = set()
        """Versions and peers."""
        self._requests_read = 0
        self._pending: dict[str, Any] | None = None
        """An invitation of the trainer that came while a peer gave."""

    @property
    def absence(self) -> str:
        """Why there is no trainer; empty where there is one."""
        address = self._address
        return "" if self._peers else f"no trainer is at {address}: it makes Replicas(…, address={address!r})"

    def look(self) -> dict[str, Any] | None:
        """What this replica is to do next: take part in a refit of the trainer, or of a peer that gives, or give.

        Joins, where there is a trainer and that is not done.

        Raises:
            PeerError: The trainer is dead, silent, has left, or is out of reach.
            RefitError: Another process has taken the name.
        """
        if self._usurped is not None:
            raise RefitError(self._usurped)
        if (self._store is None or self._peers is None) and not self._reach():
            return None
        self.check()
        store = self._store
        assert store is not None
        if self._number is None:
            self._join(store)
        if (dropped := store.read(f"dropped/{self._number}")) is not None:
            if dropped["taken"]:
                self._usurped = (
                    f"the trainer at {self._address} has dropped this replica: {dropped['why']}; give every replica a "
                    f"name of its own"
                )
                raise RefitError(self._usurped)
            self.join_again()
            return None
        invitation = self._pending
        if invitation is None:
            said = store.read(f"invited/{self._number}")
            if said is not None and said["call"] > self._call:
                invitation, self._call = said, said["call"]
        given = self._answer_of_peer(store, withdraw=invitation is not None)
        self._pending = invitation if given is not None else None
        return given or invitation or self._request_to_give(store)

    def check(self, *, in_refit: bool = False) -> None:
        """Pass while the trainer lives and, `in_refit`, goes on with it.

        Raises:
            PeerError: It is dead, silent, has left, is out of reach, or has gone on without this replica.
        """
        if self._peers is None or time.monotonic() - self._looked < PATIENCE_S:
            return
        self._looked = time.monotonic()
        self._peers.check()
        dropped = self._store.read(f"dropped/{self._number}") if in_refit and self._store is not None else None
        if dropped is not None:
            raise PeerError(f"the trainer has gone on without this replica: {dropped['why']}", peer="source 0")

    def tell(self, version: int) -> None:
        """Say which version a peer has given."""
        if self._store is not None and self._pending is None:
            self._store.write(f"version/{self._number}", version)

    def join_again(self) -> None:
        """Under a new number, with a new session; or leave, if the trainer is gone, or has dropped this replica."""
        before, self._looked = self._heartbeat, 0.0
        asked, self._asked, self._pending = self._asked, None, None
        try:
            self.check()
            if asked is not None and self._store is not None:
                self._store.compare_set(asked[0], _OPEN, _WITHDRAWN)
            if self._store is None or self._usurped is not None:
                self.leave()
            elif self._number is not None:
                try:
                    self._join(self._store)
                finally:
                    if before is not None:
                        before.stop()
        except RuntimeError:  # a RefitError, or torch's own, of a store that ended while its process lives
            self.leave()

    def leave(self) -> None:
        """Take part no more, until the next look."""
        heartbeat, store = self._heartbeat, self._store
        self._heartbeat = self._number = self._store = self._peers = self._asked = self._pending = None
        if heartbeat is not None:
            heartbeat.stop()
        if store is not None:
            store.close()

    def _reach(self) -> bool:
        """Whether a trainer is there; looks no more often than is polite."""
        if time.monotonic() - self._looked < PATIENCE_S:
            return False
        self._looked = time.monotonic()
        if self._store is None:
            if not listens(*host_and_port(self._address)):
                return False
            meeting = _patient(self._liveness_s)(self._address, num_sources=1, num_sinks=1, sink_rank=0, hosts=False)
            meeting.host = "source 0"
            self._store = meeting.bounded(self._name)
        if (process := self._store.read("party/source 0")) is None:  # another program's store, or another name
            return False
        self._call = self._requests_read = 0
        self._peers = Peers(self._store, {"source 0": process}, listen_to=["source 0"], liveness_s=self._liveness_s)
        return True

    def _join(self, store: BoundedStore) -> None:
        """Sign the log, at its end, once there are signs of life."""
        party = f"replica {uuid.uuid4().hex}"
        self._heartbeat = Heartbeat(store.clone(), (party,), liveness_s=self._liveness_s)
        entry = {"party": party, "identity": self._identity, "process": this_process(), **self._place()}
        self._number = store.write_next("log", {**entry, "version": self._version(), "gives": self._gives})

    def _version(self) -> int | None:
        """Of the weights that the engine has; None where they are of no use."""
        with contextlib.suppress(RefitError):
            self._sink.check()
            version: int | None = getattr(self._sink, "version", None)
            return version
        return None

    @property
    def _gives(self) -> bool:
        return hasattr(self._sink, "weights")

    # -- From a living peer -------------------------------------------------------------------------------------------

    def _answer_of_peer(self, store: BoundedStore, *, withdraw: bool) -> dict[str, Any] | None:
        """For a newcomer: how to take part in what a peer gives, once it does; asks one, unless that is done.

        With `withdraw` the trainer has called, so that a peer that has not answered yet is not needed any more.
        """
        if self._asked is None:
            if not withdraw and self._from_peers:
                self._ask_peer(store)
            return None
        key, invitation, until = self._asked
        answer = store.get(key).decode()
        if answer == _OPEN and (withdraw or time.monotonic() > until):
            answer = store.compare_set(key, _OPEN, _WITHDRAWN).decode()
        if answer == _OPEN:
            return None
        self._asked = None
        store.delete_key(key)
        return invitation if answer == _GIVEN else None

    def _ask_peer(self, store: BoundedStore) -> None:
        """Ask a replica that has the committed version for it, each once."""
        if time.monotonic() - self._looked_for_peers < PATIENCE_S:
            return
        self._looked_for_peers = time.monotonic()
        holders, own = store.read("holders"), getattr(self._sink, "version", None)
        if holders is None or (own is not None and own >= holders["version"]):
            return
        version = holders["version"]
        places = [each for each in holders["replicas"] if each["identity"] != self._identity]
        places = [each for each in places if (version, each["identity"]) not in self._asked_before]
        if not places:
            return
        place = random.choice(places)
        self._asked_before.add((version, place["identity"]))
        session = f"peer {uuid.uuid4().hex}"
        store.set(f"answer/{session}", _OPEN)
        store.write_next(f"requests/{place['identity']}", {"session": session, "gives": version, **self._place()})
        invitation = {"session": session, "num_sources": place["num_ranks"], "rewind": False, "peer": place}
        self._asked = f"answer/{session}", invitation, time.monotonic() + self._liveness_s

    def _request_to_give(self, store: BoundedStore) -> dict[str, Any] | None:
        """For a replica that has the weights: a newcomer's request, if it still stands."""
        while (request := store.read(f"requests/{self._identity}/{self._requests_read}")) is not None:
            self._requests_read += 1
            if self._version() != request["gives"] or not self._gives:  # others have it still
                continue
            if not listens(*host_and_port(request["address"])):  # the newcomer is gone
                continue
            if store.compare_set(f"answer/{request['session']}", _OPEN, _GIVEN).decode() == _GIVEN:
                return dict(request)
        return None
