"""Who takes part in a refit over several processes, which of them this process is, and where they meet.

Parties are named "source 0", "sink 1"; a process may be one of each. They meet in a `torch.distributed` store: one that
the caller has, or one that an address names. Its keys hold JSON.

The store is best hosted by who must survive the others: by default sink 0, so that an engine that loses its trainer
still learns, from the store, what was decided.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from rl_refit.errors import PeerError, RefitError
from rl_refit.stores import BoundedStore, FileStore, Line, PrefixStore, Store, TCPStore, clone, in_thread

__all__ = ["Rendezvous"]


@final
class Rendezvous:
    """Where the parties of a refit meet. All of them construct one, alike but for their own ranks.

    Args:
        address: "tcp://127.0.0.1:29555", a free port of an address that all parties reach; "file:///private/dir/store",
            a file that does not exist yet, on one host; or a store. Whoever reaches it can make an engine take other
            weights: keep it on loopback, in a private directory, or on a network of your own. Port 0 is a free one, for
            the process that hosts; `address` says which, once it is connected.
        num_sources: Ranks of the source.
        num_sinks: Ranks of the sink.
        source_rank: This process's rank of the source; None where it has none.
        sink_rank: This process's rank of the sink; None where it has none.
        hosts: Whether this process hosts the store of a "tcp://" address; by default sink 0 does.
        timeout_s: Seconds to wait for the store to appear.
        liveness_s: Seconds without a sign of life after which a party counts as dead; on one host a dead process is
            seen at once.
        name: Of this refit, where one store serves several, or a second one after a party was restarted.

    Raises:
        ValueError: The numbers do not fit one another, or the address is of no known kind.
    """

    def __init__(
        self,
        address: str | Store,
        *,
        num_sources: int,
        num_sinks: int,
        source_rank: int | None = None,
        sink_rank: int | None = None,
        hosts: bool | None = None,
        timeout_s: float = 60.0,
        liveness_s: float = 30.0,
        name: str = "rl-refit",
    ) -> None:
        for side, rank, count in (("source", source_rank, num_sources), ("sink", sink_rank, num_sinks)):
            if count < 1 or (rank is not None and not 0 <= rank < count):
                raise ValueError(f"{side}_rank={rank} is no rank of num_{side}s={count}")
        if source_rank is None and sink_rank is None:
            raise ValueError("a party has a source_rank, a sink_rank, or both; got neither")
        if not liveness_s > 0 or not timeout_s > 0:
            raise ValueError(f"liveness_s and timeout_s must be positive; got {liveness_s} and {timeout_s}")
        self.address = address if isinstance(address, str) else _address_of(address)
        """As a URL; of a store that has none, its class."""
        self.num_sources, self.num_sinks = num_sources, num_sinks
        self.source_rank, self.sink_rank = source_rank, sink_rank
        self.liveness_s = liveness_s
        self.name = name
        by_default = isinstance(address, str) and urlsplit(address).scheme == "tcp"
        self.host = "sink 0" if by_default and hosts is None else "another party"
        self.hosts = by_default and sink_rank == 0 if hosts is None else hosts
        self._timeout_s = timeout_s
        self._store = None if isinstance(address, str) else address
        if isinstance(address, str):
            _check_address(address)

    @property
    def parties(self) -> tuple[str, ...]:
        """Everyone: "source 0" and so on, then "sink 0" and so on."""
        sources = (f"source {rank}" for rank in range(self.num_sources))
        return (*sources, *(f"sink {rank}" for rank in range(self.num_sinks)))

    @property
    def mine(self) -> tuple[str, ...]:
        """The one or two parties that this process is."""
        source = () if self.source_rank is None else (f"source {self.source_rank}",)
        return source if self.sink_rank is None else (*source, f"sink {self.sink_rank}")

    @property
    def leader(self) -> str:
        """The party that begins refits and gathers answers."""
        return "source 0"

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.source_rank == 0

    @property
    def numbers(self) -> str:
        """What all parties must agree on before anything else."""
        return f"{self.num_sources} sources and {self.num_sinks} sinks"

    def connect(self) -> Store:
        """The store; made at the first call, and kept.

        Raises:
            RefitError: It cannot be reached within `timeout_s`, or its address is taken.
        """
        if self._store is None:
            try:
                self._store = self._open()
            except (RuntimeError, OSError) as error:
                role = "host" if self.hosts else "reach"
                raise RefitError(
                    f"{' and '.join(self.mine)} cannot {role} the store at {self.address}: "
                    f"{str(error).splitlines()[0]}; {self.host} hosts it"
                ) from error
        return self._store

    def bounded(self, prefix: str, *, store: Store | None = None) -> BoundedStore:
        """The store under keys of its own, with a thread that asks it: a call ends within `liveness_s`, or is lost.

        Args:
            prefix: Of these keys.
            store: A connection of its own, for a thread beside the one that uses `connect`'s.

        Raises:
            RefitError: As `connect`.
        """
        return BoundedStore(PrefixStore(prefix, store or self.connect()), Line(self.liveness_s, self.lost))

    def clone(self) -> Store:
        """The store with a connection of its own, for another thread; its calls are not bounded.

        Raises:
            RefitError: As `connect`.
            PeerError: Its host is gone, or does not answer within `liveness_s`.
        """
        try:
            return in_thread(partial(clone, self.connect()), name="connection").result(self.liveness_s)
        except TimeoutError:
            why = f"no answer within {self.liveness_s} s: its host is stopped or cut off"
            raise self.lost(why) from None
        except RuntimeError as error:
            raise self.lost(str(error).splitlines()[0]) from error

    def lost(self, why: str) -> PeerError:
        """That the store is out of reach."""
        text = f"the store of the rendezvous at {self.address}, which {self.host} hosts, is out of reach: {why}"
        return PeerError(text, peer=self.host)

    def forget(self) -> None:
        """Let go of the store, which ends with its host's last reference to it."""
        self._store = None

    def _join(self, host: str, port: int, timeout: timedelta) -> Store:
        """The store that another party hosts. In a thread: torch waits for ever for a listener that says nothing."""
        connect = partial(TCPStore, host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        try:
            return in_thread(connect, name="rendezvous").result(self._timeout_s + 1.0)
        except TimeoutError:
            raise OSError("something listens there, and is no store of torch") from None
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{str(error).splitlines()[0]} (is it up, and no other program?)") from error

    def _open(self) -> Store:
        parts = urlsplit(self.address)
        if parts.scheme == "file":
            return FileStore(parts.path, self.num_sources + self.num_sinks)
        assert parts.hostname is not None
        assert parts.port is not None
        timeout = timedelta(seconds=self._timeout_s)
        if not self.hosts:
            return self._join(parts.hostname, parts.port, timeout)
        listener = _listen(parts.hostname, parts.port)  # torch's own would listen on every interface
        port = listener.getsockname()[1]
        self.address = f"tcp://{parts.netloc.rpartition(':')[0]}:{port}"
        return TCPStore(
            parts.hostname,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _address_of(store: Any) -> str:
    """How other processes reach a store of this one."""
    if isinstance(store, TCPStore):
        return f"tcp://{store.host}:{store.port}"
    return f"file://{store.path}" if hasattr(store, "path") else type(store).__name__


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme == "file":
        if parts.netloc:
            raise ValueError(
                f"address={address!r} needs three slashes, file:///absolute/path; {parts.netloc!r} is a host"
            )
        if not Path(parts.path).parent.is_dir():
            raise ValueError(f"address={address!r}: {Path(parts.path).parent} is no directory; create it first")
    elif parts.scheme != "tcp":
        raise ValueError(f"address={address!r} is neither tcp://host:port nor file:///path, nor a store")
    elif parts.hostname is None or parts.port is None:
        raise ValueError(f"address={address!r} needs a host and a port, as in tcp://127.0.0.1:29555")


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
