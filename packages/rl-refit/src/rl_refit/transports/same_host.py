"""Processes of one host find each other and hand over memory: once, before the first transfer.

Each source rank listens at a socket in a private directory (0700) and tells its place through the store; each sink rank
that shares a stream with it connects, and gets the memory through that connection, which stays open for tokens. The
directory is gone as soon as all are connected; a process that is killed before leaves it empty but for a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_refit.errors import PeerError, RefitError
from rl_refit.stores import Store
from rl_refit.transports.base import PATIENCE_S, Channel, Watch
from rl_refit.transports.tokens import Link

__all__ = ["Handle", "Pair", "meet", "pairs_of", "require_one_host"]

Pair = tuple[int, int]
"""A source rank and a sink rank."""

_LONGEST_HANDLE = 4096
_PAUSE_S = 2e-3
_GRACE_S = 2.0
"""A socket that is not where its owner says it is for so long is not on this machine's file system."""


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process gets a source rank's memory."""

    description: dict[str, Any]
    """As JSON."""

    descriptors: Sequence[int] = ()
    """Of open files, which go along."""


def pairs_of(channel: Channel) -> tuple[Pair, ...]:
    """The pairs of this process with another one, in the order that all parties share."""
    mine = (channel.source_rank, channel.sink_rank)
    pairs = {(stream.source_rank, sink) for stream in channel.schedule.streams for sink in stream.sink_ranks}
    return tuple(sorted(pair for pair in pairs if (pair[0] == mine[0]) != (pair[1] == mine[1])))


def require_one_host(channel: Channel, watch: Watch) -> None:
    """Compare this process's machine with those of its peers.

    Raises:
        RefitError: They are not the same, this is not Linux, or `watch.check` raises.
    """
    if sys.platform != "linux":
        raise RefitError(f"transports of one host need Linux; this is {sys.platform}", phase="prepare")
    pairs = pairs_of(channel)
    if not pairs:
        return
    store, mine = _store(channel), _this_host()
    peers = {_other(pair, channel) for pair in pairs}
    roles = (("source", channel.source_rank), ("sink", channel.sink_rank))
    for name in (f"{role} {rank}" for role, rank in roles if rank is not None):
        store.set(f"host of {name}", json.dumps(mine))
    for peer in sorted(peers):
        theirs = _read(store, f"host of {peer}", (peer, watch))
        if theirs["boot"] != mine["boot"]:
            raise RefitError(
                f"{peer} runs on another host, {theirs['name']!r}, than this process, {mine['name']!r}: shared memory "
                f"ends at the host; use a transport that crosses it",
                phase="prepare",
                peer=peer,
            )


def meet(
    channel: Channel, handles: Mapping[int, Handle], watch: Watch, *, directory: str
) -> tuple[dict[Pair, Link], dict[int, Handle]]:
    """Connect this process with its peers, and hand over memory.

    Args:
        channel: Who this process is.
        handles: For each sink rank that this process's source rank serves, how it gets the memory.
        watch: Looked at while waiting.
        directory: Where the private directory is made.

    Returns:
        A link for each pair, in the order of the pairs; and for each source rank that serves this process, its handle.
        The descriptors are the caller's to close.

    Raises:
        RefitError: A peer died, or cannot be reached; or `watch.check` raises.
    """
    pairs = pairs_of(channel)
    served = {sink: source for source, sink in pairs if source == channel.source_rank}
    read_from = [pair for pair in pairs if pair[1] == channel.sink_rank]
    connections: dict[Pair, socket.socket] = {}
    with _listening(directory, channel, len(served)) if served else contextlib.nullcontext() as listener:
        try:
            # A connection needs no answer from who listens, so nobody waits here for a party that waits as well.
            for pair in read_from:
                connections[pair] = _connect(channel, pair[0], watch)
            while listener is not None and not all((source, sink) in connections for sink, source in served.items()):
                sink, connection = _accept(listener, watch)
                connections[served[sink], sink] = connection
                description = json.dumps(handles[sink].description).encode()
                socket.send_fds(connection, [description], list(handles[sink].descriptors))
            received = {pair[0]: _receive_handle(connections[pair], (f"source {pair[0]}", watch)) for pair in read_from}
        except BaseException:
            _close_all(connections)
            raise
    return {pair: Link(connections[pair], _other(pair, channel)) for pair in pairs}, received


def _close_all(connections: dict[Pair, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _other(pair: Pair, channel: Channel) -> str:
    source_rank, sink_rank = pair
    return f"source {source_rank}" if sink_rank == channel.sink_rank else f"sink {sink_rank}"


@contextlib.contextmanager
def _listening(directory: str, channel: Channel, connections: int) -> Iterator[socket.socket]:
    """A socket at which that many sink ranks can connect."""
    private = tempfile.mkdtemp(prefix="rl-refit-", dir=directory)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with _short_name(private) as name:
                listener.bind(f"{name}/source")
            listener.listen(connections)
            listener.setblocking(False)
            _publish_address(channel, private)
            yield listener
    finally:
        shutil.rmtree(private, ignore_errors=True)
        _publish_address(channel, None)


def _publish_address(channel: Channel, directory: str | None) -> None:
    _store(channel).set(f"address of source {channel.source_rank}", json.dumps({"directory": directory}))


def _connect(channel: Channel, source_rank: int, watch: Watch) -> socket.socket:
    peer, store = f"source {source_rank}", _store(channel)
    missing_since, missing = time.monotonic(), ""
    while True:
        directory = _read(store, f"address of {peer}", (peer, watch))["directory"]
        if directory is None:  # of an earlier opening
            time.sleep(_PAUSE_S)
            watch.check()
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short_name(directory) as name:
                connection.connect(f"{name}/source")
            connection.send(json.dumps({"sink": channel.sink_rank}).encode())
            return connection
        except OSError as error:
            connection.close()
            if directory != missing:
                missing, missing_since = directory, time.monotonic()
            if time.monotonic() - missing_since > _GRACE_S:
                raise PeerError(
                    f"{peer} says that it listens in {directory}, which is not so here ({error}): it died, or it sees "
                    f"another file system; containers must share {Path(directory).parent} (--ipc=host, or one volume)",
                    phase="prepare",
                    peer=peer,
                ) from error
            time.sleep(_PAUSE_S)
            watch.check()


def _accept(listener: socket.socket, watch: Watch) -> tuple[int, socket.socket]:
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
            return int(json.loads(introduction)["sink"]), connection
        connection.close()
        raise PeerError("a sink is gone: it closed the connection before it said which", phase="prepare")


def _receive_handle(connection: socket.socket, waiting: tuple[str, Watch]) -> Handle:
    peer, watch = waiting
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


def _read(store: Store, key: str, waiting: tuple[str, Watch]) -> dict[str, Any]:
    """Wait for `key`."""
    peer, watch = waiting
    watch.peer = peer
    pause_s = 1e-4
    while not store.check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)
        watch.check()
    read: dict[str, Any] = json.loads(store.get(key))
    return read


def _store(channel: Channel) -> Store:
    if channel.store is None:
        raise RefitError("processes of one host meet through a store, and this channel has none", phase="prepare")
    return channel.store


def _this_host() -> dict[str, str]:
    """The boot of the kernel, which containers of one machine share, and the name that people know."""
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "name": socket.gethostname()}


@contextlib.contextmanager
def _short_name(directory: str) -> Iterator[str]:
    """Another name of `directory`, since the address of a socket has at most 107 bytes."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
