"""`Replica`: an engine that joins whichever trainer is at an address, and takes part in refits under its name.

What the two sides write where they meet is described in `rl_refit.replicas`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
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
from rl_refit.stores import PrefixStore, Store, clone
from rl_refit.transaction.bounded_store import BoundedStore, Line
from rl_refit.transaction.liveness import Heartbeat, Peers, this_process
from rl_refit.transports.base import PATIENCE_S, Transport

__all__ = ["TRAINER_NAME", "Replica", "host_and_port", "slot_stream"]

TRAINER_NAME = "rl-refit replicas"
"""Of the replicas of a trainer, where its address serves no others."""

_DEFAULTS = RefitConfig()
_WITHDRAWN = "{}"
"""Instead of an invitation that rank 0 has given up."""


def slot_stream() -> Transport:
    """A `SlotStream`, which is imported when it is needed."""
    from rl_refit.transports.stream import SlotStream

    return SlotStream()


def host_and_port(address: str) -> tuple[str, int]:
    """Of "tcp://host:port".

    Raises:
        ValueError: It is of another kind.
    """
    parts = urlsplit(address)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise ValueError(f"address={address!r} is not tcp://host:port, where replicas and their trainer meet")
    return parts.hostname, parts.port


class _NoneBeganError(DeadlineError):
    """Nobody invited this replica in time."""


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
        transport: Callable[[], Transport] = slot_stream,
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
        self._rank, self._address = rank, address
        self._num_ranks = sink.num_ranks if isinstance(sink, EngineSink) else num_ranks
        self._raw: Store | None = None
        self._store: BoundedStore | None = None
        """Of this replica, hosted by its rank 0."""
        self._taken = ""
        """The last invitation that this rank has taken."""
        self._refit: Refit | None = None
        self._session = ""
        self._closed = False
        self._trainer = _Trainer(trainer, trainer_name, liveness_s) if rank == 0 else None

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
        if self._closed:
            raise RefitError("this Replica is closed; make a new one")
        try:
            invitation = self._await_invitation(timeout_s)
            return self._take_part(json.loads(invitation))
        except _NoneBeganError as late:  # this replica stays where it has joined
            raise DeadlineError(str(late), phase="prepare", peer="source 0", seconds=late.seconds) from None
        except BaseException as error:
            self._give_up(error)
            raise

    def close(self) -> None:
        """Leave; the trainer goes on without this replica, which may come back under its name."""
        if not self._closed:
            self._closed = True
            self._give_up(RefitError("it was closed"))

    def _await_invitation(self, timeout_s: float | None) -> str:
        self._connect()
        began, nap_s = time.monotonic(), 2e-4
        while (invitation := self._look()) is None:
            waited = time.monotonic() - began
            absence = "" if self._trainer is None or self._trainer.is_known else self._trainer.absence
            if timeout_s is None and absence and waited >= self._liveness_s:
                raise PeerError(f"{absence}; the sink is as it was", peer="source 0")
            if timeout_s is not None and waited >= timeout_s:
                why = f" ({absence})" if absence else ""
                text = f"no refit began within timeout_s={timeout_s:g}{why}; the sink is as it was"
                raise _NoneBeganError(text, seconds=waited)
            time.sleep(nap_s)
            nap_s = min(1.1 * nap_s, LONGEST_NAP_S)
        return invitation

    def _connect(self) -> None:
        if self._store is not None:
            return
        meeting = Rendezvous(
            self._address,
            num_sources=1,
            num_sinks=self._num_ranks,
            sink_rank=self._rank,
            timeout_s=self._liveness_s,
        )
        self._raw = meeting.connect()
        host, port = host_and_port(self._address)
        if port == 0:
            store: Any = self._raw
            self._address = f"tcp://{host}:{store.port}"
        line = Line(
            self._liveness_s,
            lambda why: PeerError(f"rank 0 of replica {self.name} is out of reach at {self._address}: {why}"),
        )
        self._store = BoundedStore(PrefixStore("replica", self._raw), line)

    def _look(self) -> str | None:
        """An invitation that this rank has not taken yet, as JSON; rank 0 hands the trainer's to the others."""
        assert self._store is not None
        if self._trainer is not None:
            invitation = self._trainer.look(self._entry)
            if invitation is not None:
                self._store.set("invitation", invitation)
        else:
            said = self._store.get("invitation").decode() if self._store.check(["invitation"]) else _WITHDRAWN
            invitation = None if said in (_WITHDRAWN, self._taken) else said
        if invitation is not None:
            self._taken = invitation
        return invitation

    def _entry(self) -> dict[str, Any]:
        """What the trainer is told of this replica."""
        version = None if getattr(self._sink, "poisoned", False) else getattr(self._sink, "version", None)
        return {"name": self.name, "address": self._address, "num_ranks": self._num_ranks, "version": version}

    def _take_part(self, invitation: Mapping[str, Any]) -> RefitReport:
        if self._refit is None or self._session != invitation["session"]:
            self._close_refit()
            assert self._raw is not None
            rendezvous = Rendezvous(
                clone(self._raw),
                num_sources=invitation["num_sources"],
                num_sinks=self._num_ranks,
                sink_rank=self._rank,
                hosts=self._rank == 0,
                liveness_s=self._liveness_s,
                name=invitation["session"],
            )
            self._session = invitation["session"]
            self._refit = Refit(
                sink=self._sink, transport=self._transport(), rendezvous=rendezvous, **asdict(self._config)
            )
            self._refit._look_also = self._look_also  # noqa: SLF001  (made here)
        if invitation["rewind"]:
            self._sink.rewind(invitation["version"])
        return self._refit.receive(timeout_s=self._config.deadline_s)

    def _look_also(self) -> None:
        """While this rank is in a refit: see that neither the trainer nor rank 0 has given it up."""
        if self._trainer is not None:
            self._trainer.check(in_refit=True)
        elif self._store is not None and self._store.get("invitation").decode() != self._taken:
            raise PeerError(f"rank 0 of replica {self.name} gave this refit up; its errors say why", peer="sink 0")

    def _give_up(self, error: BaseException) -> None:
        """Leave this refit, tell the other ranks, and join the trainer again, if that lives, with what is held now."""
        self._close_refit()
        store, lost = self._store, isinstance(error, PeerError) and self._trainer is None
        with contextlib.suppress(RefitError):
            if self._trainer is not None:
                if store is not None:
                    store.set("invitation", _WITHDRAWN)
                if self._closed:
                    self._trainer.leave()
                else:
                    self._trainer.join_again(self._entry())
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
    """The trainer as rank 0 of a replica sees it, through the store at its address."""

    def __init__(self, address: str, name: str, liveness_s: float) -> None:
        self._address, self._name, self._liveness_s = address, name, liveness_s
        self._place = host_and_port(address)
        self._identity = uuid.uuid4().hex
        self._raw: Store | None = None
        self._store: BoundedStore | None = None
        self._peers: Peers | None = None
        self._heartbeat: Heartbeat | None = None
        self._number: int | None = None
        self._call = 0
        self._looked = 0.0
        self._usurped: str | None = None
        self.absence = f"no trainer is at {address}: it makes Replicas(…, address={address!r})"
        """Why there is none."""

    @property
    def is_known(self) -> bool:
        """Whether one is there."""
        return self._peers is not None

    def look(self, entry: Callable[[], dict[str, Any]]) -> str | None:
        """The trainer's latest invitation, if it is new. Joins, where there is a trainer and that is not done.

        Args:
            entry: What the trainer is told.

        Raises:
            PeerError: The trainer is dead, silent, has left, or is out of reach.
            RefitError: Another process has taken the name.
        """
        if self._usurped is not None:
            raise RefitError(self._usurped)
        if self._peers is None and not self._reach():
            return None
        assert self._store is not None
        self.check()
        if self._number is None:
            self._join(self._store, entry())
        if self._store.check([f"dropped/{self._number}"]):
            dropped = json.loads(self._store.get(f"dropped/{self._number}"))
            if dropped["taken"]:
                self._usurped = (
                    f"the trainer at {self._address} has dropped this replica: {dropped['why']}; give every replica a "
                    f"name of its own"
                )
                raise RefitError(self._usurped)
            self.join_again(entry())
        if not self._store.check([f"invited/{self._number}"]):
            return None
        text = self._store.get(f"invited/{self._number}").decode()
        call = json.loads(text)["call"]
        if call <= self._call:
            return None
        self._call = call
        return text

    def check(self, *, in_refit: bool = False) -> None:
        """Pass while the trainer lives and, `in_refit`, goes on with it.

        Raises:
            PeerError: It is dead, silent, has left, is out of reach, or has gone on without this replica.
        """
        if self._peers is None or time.monotonic() - self._looked < PATIENCE_S:
            return
        self._looked = time.monotonic()
        self._peers.check()
        if in_refit and self._store is not None and self._store.check([f"dropped/{self._number}"]):
            why = json.loads(self._store.get(f"dropped/{self._number}"))["why"]
            raise PeerError(f"the trainer has gone on without this replica: {why}", peer="source 0")

    def join_again(self, entry: Mapping[str, Any]) -> None:
        """Under a new number, with a new session; or leave, if the trainer is gone, or has dropped this replica."""
        before, self._looked = self._heartbeat, 0.0
        try:
            self.check()
            if self._store is None or self._usurped is not None:
                self.leave()
            elif self._number is not None:
                self._join(self._store, entry)
                if before is not None:
                    before.stop()
        except RefitError:
            self.leave()

    def leave(self) -> None:
        """Take part no more, until the next look."""
        heartbeat, store = self._heartbeat, self._store
        self._heartbeat = self._number = self._store = self._peers = self._raw = None
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
            try:  # torch's own client would go on trying in silence
                with socket.create_connection(self._place, timeout=1.0) as probe:
                    if probe.getsockname() == probe.getpeername():  # a port that nobody has may connect to itself
                        return False
            except OSError:
                return False
            meeting = Rendezvous(
                self._address, num_sources=1, num_sinks=1, sink_rank=0, hosts=False, timeout_s=self._liveness_s
            )
            meeting.host = "source 0"
            self._raw = PrefixStore(self._name, meeting.connect())
            line = Line(
                self._liveness_s,
                lambda why: PeerError(f"the trainer is out of reach at {self._address}: {why}", peer="source 0"),
            )
            self._store = BoundedStore(self._raw, line)
        if not self._store.check(["party/source 0"]):  # another program's store, or another name
            return False
        (process,) = json.loads(self._store.get("party/source 0").decode().removeprefix("="))
        self._call = 0
        self._peers = Peers(self._store, {"source 0": process}, listen_to=["source 0"], liveness_s=self._liveness_s)
        return True

    def _join(self, store: BoundedStore, entry: Mapping[str, Any]) -> None:
        """Sign the log, at its end, once there are signs of life."""
        assert self._raw is not None
        party = f"replica {uuid.uuid4().hex}"
        self._heartbeat = Heartbeat(self._raw, (party,), liveness_s=self._liveness_s)
        text = json.dumps({**entry, "party": party, "identity": self._identity, "process": this_process()})
        for number in itertools.count():
            if store.compare_set(f"log/{number}", "", text).decode() == text:
                self._number = number
                return
