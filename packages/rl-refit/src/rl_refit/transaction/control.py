"""What the parties of a refit tell one another, through a `torch.distributed.Store`; JSON, and nothing else.

A party posts under keys of its own and polls for the keys of others, so that no wait blocks in the store: every wait
looks at the watch, and with it at deadlines, aborts and deaths. All parties report to one, the leader (source 0), which
answers all at once: that is two messages a party and step, for any number of parties.

One key of each refit is the decision. It is set by compare-and-set, so that "commit" and any number of aborts compete
for it and one wins, for everybody, even after the leader has died.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any, final

from rl_refit.errors import AbortedError, DeadlineError, PeerError, RefitError, error_from_message, error_to_message
from rl_refit.rendezvous import Rendezvous
from rl_refit.stores import BoundedStore, PrefixStore
from rl_refit.transaction.liveness import Heartbeat, Peers, this_process
from rl_refit.transports.base import Watch

__all__ = ["COMMIT", "Control"]

COMMIT = "commit"
"""The decision that all sinks make the staged weights theirs."""

_LONGEST_NAP_S = 2e-3
_FAREWELL_S = 2.0
_KEPT_REFITS = 2  # parties may be one refit behind the leader when they read its keys


@final
class Control:
    """This process's end of the store.

    Args:
        rendezvous: Who takes part, and which of them this process is.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.refit = 0
        """Number of the last refit that began; the leader counts them, and who missed some goes on with the latest."""
        self._store: BoundedStore | None = None
        self.under_way = False
        """Whether a refit has begun, and is not over for this party."""
        self.processes: dict[str, Any] = {}
        """What each party said of its process when they met."""
        self._peers: Peers | None = None
        self._heartbeat: Heartbeat | None = None
        self._posted: dict[int, list[str]] = {}
        self._undecided = False
        self._completed: set[int] = set()
        self._nonce = uuid.uuid4().hex  # of two Refits of one process, each is a party of its own

    @property
    def store(self) -> BoundedStore:
        """Where this process meets the others, once it has introduced itself."""
        assert self._store is not None
        return self._store

    def meet(self, watch: Watch) -> None:
        """Connect, say who this is, and learn who the others are; once."""
        if self.processes:
            return
        meeting = self.rendezvous
        if self._heartbeat is None:
            self.introduce()
        processes: dict[str, Any] = {}
        for party in meeting.parties:
            process = processes[party] = self._wait(f"party/{party}", watch, peer=party)
            self._look_after(processes)
            if process["hosts"]:
                meeting.host = party
            if process["numbers"] != meeting.numbers:
                raise PeerError(
                    f"{party} was told of {process['numbers']} and this process of {meeting.numbers}: "
                    f"give all parties the same num_sources and num_sinks",
                    peer=party,
                )
        self.processes = processes

    def _look_after(self, processes: dict[str, Any]) -> None:
        """From now on, see whether these live: some may die before all have met."""
        meeting = self.rendezvous
        others = {party: process for party, process in processes.items() if party not in meeting.mine}
        listen_to = [*others] if meeting.leads else [party for party in others if party == meeting.leader]
        self._peers = Peers(self.store, others, listen_to=listen_to, liveness_s=meeting.liveness_s)

    def introduce(self) -> None:
        """Say who this is, once under one name."""
        meeting = self.rendezvous
        self._store = self._store or meeting.bounded(meeting.name)
        mine = {**this_process(), "numbers": meeting.numbers, "hosts": meeting.hosts, "refit": self._nonce}
        for party in meeting.mine:
            if not self.store.check([f"alive/{party}"]):  # whoever reads of this party listens for it at once
                self.store.set(f"alive/{party}", "0")
            said = self.store.write_once(f"party/{party}", mine)
            if said != mine:
                raise PeerError(
                    f"process {said['pid']} has been {party} under the name {meeting.name!r} "
                    f"before; give every party its own rank, and after a restart, or for a new Refit, all parties "
                    f"a rendezvous of another name",
                    peer=party,
                )
        try:
            counted = PrefixStore(meeting.name, meeting.connect())
            self._heartbeat = Heartbeat(counted, meeting.mine, liveness_s=meeting.liveness_s)
        except RuntimeError as error:
            raise meeting.lost(str(error).splitlines()[0]) from error

    def look_around(self) -> None:
        """Pass while no party has given up, left or died.

        Raises:
            RefitError: What a party gave up for.
            PeerError: A party is dead, silent, or has closed its end; or the store is out of reach.
        """
        if self._undecided:
            latest = self._latest()
            decision = self.store.read(self._key("decision"))
            if decision not in (None, COMMIT):
                raise error_from_message(decision)
            if decision is None and latest > self.refit:  # it was made, and deleted since
                leader = self.rendezvous.leader
                raise AbortedError(
                    f"{leader} gave refit {self.refit} up while this party was busy or stopped, and is at "
                    f"{latest} by now; its errors say why",
                    peer=leader,
                )
        if self._peers is not None:
            self._peers.check()

    def begin(self, message: dict[str, Any] | None, watch: Watch) -> dict[str, Any]:
        """Open the next refit: the leader says what it is about, the others hear it."""
        self.under_way = self._undecided = False
        if message is None:
            self.refit = self.await_next(watch)
            message = self._wait(self._key("begin"), watch, peer=self.rendezvous.leader)
        else:
            self.refit += 1
            self.post("begin", message)
            self.store.write("begun", self.refit)
        self.under_way = self._undecided = True
        self._forget(self.refit - _KEPT_REFITS)
        return message

    def await_next(self, watch: Watch, *, longest_nap_s: float = _LONGEST_NAP_S) -> int:
        """Wait until the leader has begun a refit after the last one that this party knows; its number."""
        watch.at(peer=self.rendezvous.leader)
        return watch.until(
            lambda: latest if (latest := self._latest()) > self.refit else None, longest_nap_s=longest_nap_s
        )

    def _latest(self) -> int:
        return int(self.store.read("begun") or 0)

    def post(self, key: str, value: object) -> None:
        """Set a key of this refit; not to None."""
        self._posted.setdefault(self.refit, []).extend(self.store.write(self._key(key), value))

    def is_said(self, key: str) -> bool:
        """Whether a key of this refit is set."""
        return self.store.read(self._key(key)) is not None

    def read(self, key: str, watch: Watch, *, peer: str) -> Any:
        """Wait for a key of this refit that `peer` posts."""
        return self._wait(self._key(key), watch, peer=peer)

    def gather(self, step: str, value: object, watch: Watch) -> dict[str, Any] | None:
        """Report `value` to the leader, for each party of this process; the leader gets those of all parties."""
        for party in self.rendezvous.mine:
            self.post(f"{step}/{party}", value)
        if not self.rendezvous.leads:
            return None
        return {party: self.read(f"{step}/{party}", watch, peer=party) for party in self.rendezvous.parties}

    def announce(self, step: str, value: object | None, watch: Watch) -> Any:
        """The leader's answer to a step, for all: given by the leader, waited for by the others."""
        if self.rendezvous.leads:
            self.post(f"{step}/all", value)
            return value
        return self.read(f"{step}/all", watch, peer=self.rendezvous.leader)

    def decide(self, decision: object) -> Any:
        """Propose a decision for this refit, COMMIT or why not; return the one that holds, which may be another's."""
        self._undecided = False
        decision = self.store.write_once(self._key("decision"), decision)
        self._posted.setdefault(self.refit, []).append(self._key("decision"))
        if decision != COMMIT:
            self.complete()
        return decision

    def decision(self, watch: Watch) -> Any:
        """Wait for the decision; the caller tells commit from abort."""
        self._undecided = False
        return self._wait(self._key("decision"), watch, peer=self.rendezvous.leader)

    def agree(self, step: str, watch: Watch) -> Any:
        """Decide to commit to what all parties have done, once each has said so; the decision that holds.

        Raises:
            RefitError: It cannot be learnt.
        """
        self.gather(step, True, watch)
        if self.rendezvous.leads:
            return self.decide(COMMIT)
        try:
            return self.decision(watch)
        except RefitError as silence:
            # Whoever proposes first decides for all: after this either nobody commits, or everybody does.
            return self.decide(self.abort_message(silence, watch))

    def abort_message(self, error: BaseException, watch: Watch) -> dict[str, Any]:
        """The decision that this party proposes when it fails."""
        return error_to_message(error, party=" and ".join(self.rendezvous.mine), where=watch.where())

    def complete(self) -> None:
        """Everybody has done what was decided: nobody will ask for the decision later."""
        self._completed.add(self.refit)

    def over(self) -> None:
        """This party knows how the refit ended."""
        self.under_way = False
        for party in self.rendezvous.mine:
            self.store.write(f"over/{party}", self.refit)

    def see_off(self, limit_s: float) -> None:
        """Where this process hosts the store: wait until the others know how the refit ended, or are dead."""
        if not self.rendezvous.hosts or self._peers is None:
            return
        until = time.monotonic() + limit_s
        waiting = [party for party in self.rendezvous.parties if party not in self.rendezvous.mine]
        while waiting and time.monotonic() < until:
            known = {party: self.store.read(f"over/{party}") or 0 for party in waiting}
            waiting = [party for party in waiting if known[party] < self.refit and self._peers.has_process(party)]
            time.sleep(_LONGEST_NAP_S if waiting else 0)

    def close(self) -> None:
        """Stop counting as alive; the others will see that this process has left."""
        with contextlib.suppress(PeerError):
            self.see_off(_FAREWELL_S)
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self._store is not None:
            self._store.close()

    def forget(self) -> None:
        """Once closed, and used by no thread: let go of the store, which the thread that asks holds to its end."""
        if self._store is not None:
            self._store.close(wait_s=_FAREWELL_S)
        self._store = self._peers = None

    def _key(self, name: str) -> str:
        return f"{self.refit}/{name}"

    def _wait(self, key: str, watch: Watch, *, peer: str) -> Any:
        watch.at(bucket=watch.bucket, tensor=watch.tensor, peer=peer)
        try:
            value = watch.until(lambda: self.store.read(key))
        except DeadlineError as late:
            late.add_note(self._whereabouts(late.peer))
            raise
        except PeerError:  # a peer that spoke before it left or died has spoken
            value = None
            with contextlib.suppress(PeerError):  # of a store that is lost
                value = self.store.read(key)
            if value is None:
                raise
        watch.at(bucket=watch.bucket, tensor=watch.tensor)
        return value

    def _whereabouts(self, party: str | None) -> str:
        """What is known of a party that was waited for in vain."""
        process, meeting = self.processes.get(party or ""), self.rendezvous
        if process is None:
            known = f"with this address and name={meeting.name!r}"
            return f"{party} has not come to {meeting.address}: is it started, {known}?"
        where = f"process {process['pid']} on {process['host'].split()[0]}"
        call = "receive()" if party is not None and party.startswith("sink") else "its call of the refit"
        return f"{party} is {where}, and was alive a moment ago: is it in {call}?"

    def _forget(self, refit: int) -> None:
        """Delete what this process posted for an old refit, so that the store does not grow."""
        for old in [number for number in self._posted if 0 < number <= refit]:
            for key in self._posted.pop(old):
                if key != f"{old}/decision" or old in self._completed:
                    self.store.delete_key(key)
            self._completed.discard(old)
