"""How two processes of one host that share a ring of slots meet, and the tokens that say who may use which slot.

Each owner of a ring listens at a socket in a private directory (0700) and tells its place through the store; readers
connect, and get the memory through that connection, which stays open for tokens. The directory is gone as soon as all
are connected; a process that is killed before leaves it empty but for a socket.

A token is 36 bytes; the socket keeps their bounds and their order (SOCK_SEQPACKET), and its end is the other process's
death. A token says of which refit it is, so that what a refit that was given up left in the socket is never taken for a
token of the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final
from weakref import WeakSet

from rl_refit.errors import PeerError, RefitError
from rl_refit.stores import Store
from rl_refit.transports.base import PATIENCE_S, Channel, Watch
from rl_refit.transports.peers import Peers, read_key

__all__ = ["REASON_GRACE_S", "Handle", "Key", "Kind", "Link", "Token", "meet"]

REASON_GRACE_S = 0.25
"""How long the reason for a closed connection may take to be reported by the party that closed it."""

_HEADER = struct.Struct("!4sIQIIQI")
_MAGIC = b"RLR1"


class Kind(IntEnum):
    """What a token says of a bucket."""

    FULL = 1
    """It is in its slot: read it."""

    EMPTY = 2
    """It is read: its slot may be written."""


class Token(NamedTuple):
    """One message."""

    kind: int
    refit: int
    stream: int
    bucket: int
    nbytes: int
    slot: int

    def __str__(self) -> str:
        known = self.kind in set(Kind)
        name = Kind(self.kind).name if known else f"kind {self.kind}"
        return f"{name}, refit {self.refit}, stream {self.stream}, bucket {self.bucket}, {self.nbytes} bytes"


@final
class Link:
    """One end of the socket between the owner of a ring and one of its readers.

    Args:
        connection: Connected; the link owns it from now on.
        peer: The other end, as "sink 1".
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLOUT)
        _close_in_forked_children(self)

    def send(self, token: Token, watch: Watch) -> None:
        """Send `token`.

        Raises:
            PeerError: The peer is gone.
            RefitError: What `watch.check` raises.
        """
        message = _HEADER.pack(_MAGIC, *token)
        while True:
            try:
                self._socket.send(message)
                return
            except BlockingIOError:
                watch.peer = self.peer
                watch.check()
                self._poll.poll(1e3 * min(PATIENCE_S, watch.remaining_s))
            except OSError as error:
                raise self._gone(watch) from error

    def fileno(self) -> int:
        """What to poll for a token that comes."""
        return self._socket.fileno()

    def take(self, token: Token, watch: Watch) -> Token | None:
        """The token that came if it is `token` in any slot, or None if none has come; forgets those of earlier refits.

        Raises:
            PeerError: The peer is gone.
            RefitError: Another token comes: a bucket was lost, repeated or reordered, or the schedules differ.
        """
        while (got := self._receive(watch)) is not None:
            if got._replace(slot=token.slot) == token:
                return got
            if got.refit >= token.refit:
                raise RefitError(
                    f"expected from {self.peer} the token ({token}), and got ({got}): "
                    f"a bucket was lost, sent twice or sent out of order",
                    phase=watch.phase_name,
                    bucket=token.bucket,
                    peer=self.peer,
                )
        return None

    def close(self) -> None:
        """Close this end; the peer sees it as this process's death."""
        self._socket.close()

    def _receive(self, watch: Watch) -> Token | None:
        try:
            message = self._socket.recv(_HEADER.size + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._gone(watch) from error
        if not message:
            raise self._gone(watch)
        return self._read(message, watch)

    def _gone(self, watch: Watch) -> RefitError:
        watch.peer = self.peer
        until = time.monotonic() + REASON_GRACE_S
        while time.monotonic() < until:
            watch.check()
            time.sleep(PATIENCE_S)
        watch.check()
        return PeerError(
            f"{self.peer} is gone: its process is dead, or closed its transport without a reason ({watch.where()})",
            phase=watch.phase_name,
            bucket=watch.bucket,
            peer=self.peer,
        )

    def _read(self, message: bytes, watch: Watch) -> Token:
        if len(message) == _HEADER.size:
            magic, *fields = _HEADER.unpack(message)
            if magic == _MAGIC:
                return Token(*fields)
        raise RefitError(
            f"expected from {self.peer} a token of {_HEADER.size} bytes that begins with {_MAGIC!r}; "
            f"got {len(message)} bytes: {message[:8]!r}",
            phase=watch.phase_name,
            bucket=watch.bucket,
            peer=self.peer,
        )


_open_links: WeakSet[Link] = WeakSet()


def _close_in_forked_children(link: Link) -> None:
    """A forked child, such as a worker of a data loader, would keep the socket open beyond its parent's death."""
    _watch_forks()
    _open_links.add(link)


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_links)


def _close_links() -> None:
    for link in tuple(_open_links):
        link.close()


# -- How they meet ---------------------------------------------------------------------------------------------------

Key = tuple[int, str, int]
"""The process that owns a ring; "source" for that of its own weights, "relay" for what it received; the reader."""

_LONGEST_HANDLE = 65536
_PAUSE_S = 2e-3
_GRACE_S = 2.0
"""A socket that is not where its owner says it is for so long is not on this machine's file system."""


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process gets the memory of a ring."""

    description: dict[str, Any]
    """As JSON."""

    descriptors: Sequence[int] = ()
    """Of open files, which go along."""


def meet(
    handles: Mapping[Key, Handle],
    wanted: Sequence[Key],
    *,
    peers: Peers,
    channel: Channel,
    watch: Watch,
    directory: str,
) -> tuple[dict[Key, Link], dict[Key, Handle]]:
    """Connect this process with the readers of its rings and the owners of those that it reads; hand over memory.

    Args:
        handles: For each reader of a ring of this process, how it gets the memory.
        wanted: The rings of others that this process reads.
        peers: Who is who.
        channel: Has the store.
        watch: Looked at while waiting.
        directory: Where the private directory is made.

    Returns:
        A link for each key; and the handle of each wanted one, whose descriptors are the caller's to close.

    Raises:
        RefitError: A peer died, or cannot be reached; or `watch.check` raises.
    """
    assert channel.store is not None
    connections: dict[Key, socket.socket] = {}
    with (
        _listening(directory, peers, channel.store, connections=len(handles))
        if handles
        else contextlib.nullcontext() as listener
    ):
        try:
            # A connection needs no answer from who listens, so nobody waits here for a party that waits as well.
            for key in wanted:
                connections[key] = _connect(key, peers, channel.store, watch=watch)
            while listener is not None and not all(key in connections for key in handles):
                key, connection = _accept(listener, peers.own, watch)
                connections[key] = connection
                handle = handles[key]
                socket.send_fds(connection, [json.dumps(handle.description).encode()], list(handle.descriptors))
            received = {key: _receive_handle(connections[key], peers.name_of(key[0]), watch) for key in wanted}
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
    names = {key: peers.name_of(key[2] if key in handles else key[0]) for key in connections}
    return {key: Link(connection, names[key]) for key, connection in connections.items()}, received


@contextlib.contextmanager
def _listening(directory: str, peers: Peers, store: Store, *, connections: int) -> Iterator[socket.socket]:
    """A socket at which that many readers can connect."""
    private = tempfile.mkdtemp(prefix="rl-refit-", dir=directory)
    address = f"address of {peers.name_of(peers.own)}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with _short_name(private) as name:
                listener.bind(f"{name}/source")
            listener.listen(connections)
            listener.setblocking(False)
            store.set(address, json.dumps({"directory": private}))
            yield listener
    finally:
        shutil.rmtree(private, ignore_errors=True)
        store.set(address, json.dumps({"directory": None}))


def _connect(key: Key, peers: Peers, store: Store, *, watch: Watch) -> socket.socket:
    owner = peers.name_of(key[0])
    missing_since, missing = time.monotonic(), ""
    while True:
        directory = read_key(store, f"address of {owner}", peer=owner, watch=watch)["directory"]
        if directory is None:  # of an earlier opening
            time.sleep(_PAUSE_S)
            watch.check()
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short_name(directory) as name:
                connection.connect(f"{name}/source")
            connection.send(json.dumps(key[1:]).encode())
            return connection
        except OSError as error:
            connection.close()
            if directory != missing:
                missing, missing_since = directory, time.monotonic()
            if time.monotonic() - missing_since > _GRACE_S:
                raise PeerError(
                    f"{owner} says that it listens in {directory}, which is not so here ({error}): it died, or it sees "
                    f"another file system; containers must share {Path(directory).parent} (--ipc=host, or one volume), "
                    f"or all parties say share_memory=False",
                    phase="prepare",
                    peer=owner,
                ) from error
            time.sleep(_PAUSE_S)
            watch.check()


def _accept(listener: socket.socket, own: int, watch: Watch) -> tuple[Key, socket.socket]:
    watch.peer = "a sink"
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            _await_input(listener, watch)
            continue
        try:
            _await_input(connection, watch)
            introduction = connection.recv(_LONGEST_HANDLE)
        except BaseException:
            connection.close()
            raise
        if introduction:
            ring, reader = json.loads(introduction)
            return (own, ring, reader), connection
        connection.close()
        raise PeerError("a sink is gone: it closed the connection before it said which", phase="prepare")


def _receive_handle(connection: socket.socket, peer: str, watch: Watch) -> Handle:
    watch.peer = peer
    _await_input(connection, watch)
    description, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_HANDLE, 1)
    if not description:
        raise PeerError(
            f"{peer} is gone: it closed the connection instead of handing over its memory", phase="prepare", peer=peer
        )
    return Handle(json.loads(description), descriptors)


def _await_input(connection: socket.socket, watch: Watch) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(1e3 * PATIENCE_S):
        watch.check()


@contextlib.contextmanager
def _short_name(directory: str) -> Iterator[str]:
    """Another name of `directory`, since the address of a socket has at most 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
