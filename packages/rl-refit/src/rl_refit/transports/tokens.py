"""Tokens between two processes of one host: who may read or write which slot now, over a Unix-domain socket.

A token is 32 bytes; the socket keeps their bounds and their order (SOCK_SEQPACKET), and its end is the other process's
death. A token says of which refit it is, so that what a refit that was given up left in the socket is never taken for a
token of the next one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from enum import IntEnum
from functools import cache
from typing import NamedTuple, final
from weakref import WeakSet

from rl_refit.errors import PeerError, RefitError
from rl_refit.transports.base import PATIENCE_S, Watch

__all__ = ["Kind", "Link", "Token"]

_HEADER = struct.Struct("!4sIQIIQ")
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

    def __str__(self) -> str:
        known = self.kind in set(Kind)
        name = Kind(self.kind).name if known else f"kind {self.kind}"
        return f"{name}, refit {self.refit}, stream {self.stream}, bucket {self.bucket}, {self.nbytes} bytes"


@final
class Link:
    """One end of the socket between a source rank and a sink rank.

    Args:
        connection: Connected; the link owns it from now on.
        peer: The other end, as "sink 1".
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self._socket = connection
        self._socket.setblocking(False)
        self._poll = select.poll()
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
                self._wait(select.POLLOUT, watch)
            except OSError as error:
                raise self._gone(watch) from error

    def expect(self, token: Token, watch: Watch) -> None:
        """Wait for `token`; forget what comes from earlier refits.

        Raises:
            PeerError: The peer is gone.
            RefitError: Another token comes: a bucket was lost, repeated or reordered, or the schedules differ; or what
                `watch.check` raises.
        """
        got = self._receive(watch)
        while got != token and got.refit < token.refit:
            got = self._receive(watch)
        if got != token:
            raise RefitError(
                f"expected from {self.peer} the token ({token}), and got ({got}): "
                f"a bucket was lost, sent twice or sent out of order",
                phase=watch.phase_name,
                bucket=token.bucket,
                peer=self.peer,
            )

    def close(self) -> None:
        """Close this end; the peer sees it as this process's death."""
        self._socket.close()

    def _receive(self, watch: Watch) -> Token:
        while True:
            try:
                message = self._socket.recv(_HEADER.size + 1)
            except BlockingIOError:
                self._wait(select.POLLIN, watch)
                continue
            except OSError as error:
                raise self._gone(watch) from error
            if not message:
                raise self._gone(watch)
            return self._read(message, watch)

    def _wait(self, event: int, watch: Watch) -> None:
        watch.peer = self.peer
        watch.check()
        self._poll.register(self._socket, event)
        self._poll.poll(1e3 * min(PATIENCE_S, watch.remaining_s))

    def _gone(self, watch: Watch) -> PeerError:
        watch.peer = self.peer
        return PeerError(
            f"{self.peer} is gone: its process ended, or closed its transport ({watch.where()})",
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
