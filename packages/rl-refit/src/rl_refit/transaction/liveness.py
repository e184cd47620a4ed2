"""Whether the other parties of a refit are alive, and the proof that this one is.

Knows a store and process ids. Two signs:

* every party counts up a number in the store, four times in `liveness_s`; whoever stands still for `liveness_s` is
  silent: dead, stopped, or cut off. The leader listens to all, and the others to the leader, which tells them: that is
  what a store can bear with a thousand parties;
* a party on this host whose process is gone is dead, which everybody on the host sees at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, final

from rl_refit.errors import PeerError
from rl_refit.stores import BoundedStore, Store

__all__ = ["LEFT", "Heartbeat", "Peers", "is_there", "this_process"]

LEFT = "left"
"""The count of a party that has gone by itself."""


def this_process() -> dict[str, Any]:
    """This process as others on the same host can find it: host, process id, and when it started."""
    import os

    return {"host": _this_host(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_there(process: Mapping[str, Any]) -> bool:
    """Whether a process, as `this_process` described it, is there; True where that cannot be seen, on another host."""
    return bool(process["host"] != _this_host() or _started(process["pid"]) == process["started"])


@final
class Heartbeat:
    """A thread that counts for some parties of this process until it is stopped."""

    def __init__(self, store: Store, parties: tuple[str, ...], *, liveness_s: float) -> None:
        self._store, self._parties, self._interval_s = store, parties, liveness_s / 4
        self._stop = threading.Event()
        self._beat("0")
        self._thread = threading.Thread(target=self._run, name="rl-refit heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop counting, and tell the others that these parties have left."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(self._interval_s):
            count += 1
            try:
                self._beat(str(count))
            except RuntimeError:  # the store is gone: whoever waits for anything finds out, and says so
                return
        with contextlib.suppress(RuntimeError):
            self._beat(LEFT)

    def _beat(self, count: str) -> None:
        for party in self._parties:
            self._store.set(f"alive/{party}", count)


@final
class Peers:
    """The other parties, each with the process that it said it is.

    Args:
        store: Where they count.
        processes: What each said of its process, by party; with a "name" where errors call it otherwise.
        listen_to: Those whose counts are followed.
        liveness_s: Seconds of silence that a party may keep.
    """

    def __init__(
        self,
        store: BoundedStore,
        processes: Mapping[str, dict[str, Any]],
        *,
        listen_to: Collection[str],
        liveness_s: float,
    ) -> None:
        self._store, self._processes, self._liveness_s = store, processes, liveness_s
        self._listen_to = listen_to
        self._counts: dict[str, tuple[bytes, float]] = {}
        self._heard = 0.0

    def check(self) -> None:
        """Pass while every peer shows a sign of life.

        Raises:
            PeerError: One is dead or silent; names it.
        """
        for party, process in self._processes.items():
            if not self.has_process(party):
                name = process.get("name", party)
                raise PeerError(f"{name} is dead: its process {process['pid']} on this host is gone", peer=name)
        now = monotonic()
        if now - self._heard > self._liveness_s:
            self._counts.clear()  # this process has not listened for so long that it cannot say who was silent
        if now - self._heard >= self._liveness_s / 4:
            self._heard = now
            self._listen(now)

    def has_process(self, party: str) -> bool:
        """Whether its process is there; True where that cannot be seen, on another host."""
        return is_there(self._processes[party])

    def _listen(self, now: float) -> None:
        for party in self._listen_to:
            process = self._processes[party]
            name = process.get("name", party)
            count = self._store.get(f"alive/{party}")
            if count == LEFT.encode():
                raise PeerError(f"{name} has left: it closed its Refit", peer=name)
            before, since = self._counts.get(party, (b"", now))
            if count != before:
                self._counts[party] = (count, now)
            elif now - since > self._liveness_s:
                where = f"process {process['pid']} on {process['host'].split()[0]}"
                raise PeerError(
                    f"{name} ({where}) has shown no sign of life for {now - since:.1f} s "
                    f"(liveness_s={self._liveness_s}): it is dead, stopped or cut off",
                    peer=name,
                )


@functools.cache
def _this_host() -> str:
    import socket

    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _started(pid: int) -> str | None:
    """When a process of this host started, in ticks since boot; None if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
