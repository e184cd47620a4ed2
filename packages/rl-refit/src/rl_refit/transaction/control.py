"""What the parties of a refit tell one another, through a `torch.distributed.Store`; JSON, and nothing else.

Knows no weights. A party posts under keys of its own and polls for the keys of others, so that no wait blocks in the
store: every wait looks at the watch, and with it at deadlines, aborts and deaths. All parties report to one, the leader
(source 0), which answers all at once: that is two messages a party and step, for any number of parties.

One key of each refit is the decision. It is set by compare-and-set, so that "commit" and any number of aborts compete
for it and one wins, for everybody, even after the leader has died.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from rl_refit.errors import PeerError, RefitError
from rl_refit.rendezvous import Rendezvous
from rl_refit.stores import PrefixStore, Store
from rl_refit.transaction.liveness import Heartbeat, Peers, this_process
from rl_refit.transaction.messages import error_from_message
from rl_refit.watch import Watch

__all__ = ["COMMIT", "Control"]

COMMIT = "commit"
"""The decision that all sinks make the staged weights theirs."""

_CHUNK_BYTES = 4 * 2**20  # a TCPStore takes less than 8 MiB in one value
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
        """Number of the refit under way; every party counts them."""
        self.store: Store | None = None
        self.processes: dict[str, Any] = {}
        """What each party said of its process when they met."""
        self._peers: Peers | None = None
        self._heartbeat: Heartbeat | None = None
        self._posted: dict[int, list[str]] = {}
        self._undecided = False

    def meet(self, watch: Watch) -> None:
        """Connect, say who this is, and learn who the others are; once."""
        if self.processes:
            return
        meeting = self.rendezvous
        self.store = PrefixStore(meeting.name, meeting.connect())
        with self._reaching():
            self._heartbeat = Heartbeat(self.store, meeting.mine, liveness_s=meeting.liveness_s)
            for party in meeting.mine:
                self._set(f"party/{party}", {**this_process(), "numbers": meeting.numbers})
        processes = {party: self._wait(f"party/{party}", watch, peer=party) for party in meeting.parties}
        for party, process in processes.items():
            if process["numbers"] != meeting.numbers:
                raise PeerError(
                    f"{party} was told of {process['numbers']} and this process of {meeting.numbers}: "
                    f"give all parties the same num_sources and num_sinks",
                    peer=party,
                )
        others = {party: process for party, process in processes.items() if party not in meeting.mine}
        listen_to = [*others] if meeting.leads else [meeting.leader]
        self._peers = Peers(self.store, others, listen_to=listen_to, liveness_s=meeting.liveness_s)
        self.processes = processes

    def look_around(self) -> None:
        """Pass while no party has given up, left or died.

        Raises:
            RefitError: What a party gave up for.
            PeerError: A party is dead, silent, or has closed its end; or the store is out of reach.
        """
        with self._reaching():
            if self._undecided:
                decision = self._get(self._key("decision"))
                if decision and decision != [COMMIT]:
                    raise error_from_message(decision[0])
            if self._peers is not None:
                self._peers.check()

    def begin(self, message: dict[str, Any] | None, watch: Watch) -> dict[str, Any]:
        """Open the next refit: the leader says what it is about, the others hear it."""
        self.refit += 1
        self._undecided = False
        self._forget(self.refit - _KEPT_REFITS)
        if message is None:
            message = self._wait(self._key("begin"), watch, peer=self.rendezvous.leader)
        else:
            self.post("begin", message)
        self._undecided = True
        return message

    def next_has_begun(self) -> bool:
        """Whether the leader has begun the refit after this one."""
        assert self.store is not None
        with self._reaching():
            return bool(self.store.check([f"{self.refit + 1}/begin"]))

    def post(self, key: str, value: object) -> None:
        """Set a key of this refit."""
        with self._reaching():
            self._set(self._key(key), value)

    def read(self, key: str, watch: Watch, *, peer: str) -> Any:
        """Wait for a key of this refit that `peer` posts."""
        return self._wait(self._key(key), watch, peer=peer)

    def gather(self, step: str, values: dict[str, Any], watch: Watch) -> dict[str, Any] | None:
        """Report `values`, one for each party of this process, to the leader; the leader gets those of all parties."""
        for party in self.rendezvous.mine:
            self.post(f"{step}/{party}", values[party])
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
        """Propose a decision for this refit; return the one that holds, which may be another's."""
        assert self.store is not None
        with self._reaching():
            text = self.store.compare_set(self._key("decision"), "", json.dumps([decision]))
            self._posted.setdefault(self.refit, []).append(self._key("decision"))
        self._undecided = False
        return json.loads(text)[0]

    def decision(self, watch: Watch) -> Any:
        """Wait for the decision; the caller tells commit from abort."""
        self._undecided = False
        return self._wait(self._key("decision"), watch, peer=self.rendezvous.leader)

    def namespace(self, name: str) -> Store:
        """The store under keys of its own, for a transport."""
        assert self.store is not None
        return PrefixStore(name, self.store)

    def close(self) -> None:
        """Stop counting as alive; the others will see that this process has left."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _key(self, name: str) -> str:
        return f"{self.refit}/{name}"

    def _wait(self, key: str, watch: Watch, *, peer: str) -> Any:
        watch.at(bucket=watch.bucket, tensor=watch.tensor, peer=peer)
        nap_s = 5e-5
        while True:
            with self._reaching():
                value = self._get(key)
            if value:
                watch.at(bucket=watch.bucket, tensor=watch.tensor)
                return value[0]
            watch.check()
            time.sleep(nap_s)
            nap_s = min(1.2 * nap_s, 2e-3)

    def _set(self, key: str, value: object) -> None:
        assert self.store is not None
        data = json.dumps([value], separators=(",", ":"))
        self._posted.setdefault(self.refit, []).append(key)
        if len(data) <= _CHUNK_BYTES:
            self.store.set(key, f"={data}")
            return
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self.store.set(f"{key}/{number}", chunk)
            self._posted[self.refit].append(f"{key}/{number}")
        self.store.set(key, f"+{len(chunks)}")

    def _get(self, key: str) -> list[Any]:
        """The value of a key as a list of one, or an empty one where it is not set yet."""
        assert self.store is not None
        if not self.store.check([key]):
            return []
        text = self.store.get(key).decode()
        if text.startswith("+"):
            text = "=" + "".join(self.store.get(f"{key}/{number}").decode() for number in range(int(text[1:])))
        value: list[Any] = json.loads(text.removeprefix("="))
        return value

    def _forget(self, refit: int) -> None:
        """Delete what this process posted for an old refit, so that the store does not grow."""
        assert self.store is not None
        with self._reaching():
            for key in self._posted.pop(refit, ()) if refit > 0 else ():
                self.store.delete_key(key)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RefitError:
            raise
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError are of this kind
            raise PeerError(
                f"the store of the rendezvous at {self.rendezvous.address}, which {self.rendezvous.host} hosts, is out "
                f"of reach: {str(error).splitlines()[0]}",
                peer=self.rendezvous.host,
            ) from error
