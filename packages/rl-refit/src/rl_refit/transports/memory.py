"""Slots that other processes of the host map: their memory, how the others get it, and who may use which slot.

Shared memory is a file without a name, mapped by each process. The file is made in memory (`/dev/shm`), readable by its
owner alone, and has lost its name before it has a page; other processes get it through a socket (SCM_RIGHTS). So
whatever kills the processes, the memory goes with the last of them. Its pages are allocated and touched at once: a full
file system is an error here, not a SIGBUS later. A GPU buffer is exported once to each reader (CUDA IPC), which opens
it once: handles per tensor and per refit are what makes CUDA IPC slow and leak elsewhere.

Each owner of a ring of slots listens at a socket in a private directory (0700) and tells its place through the store;
readers connect, and get the memory through that connection, which stays open for tokens. The directory is gone as soon
as all are connected; a process that is killed before leaves it empty but for a socket.

A token says that a slot is full, and one back that it is read. It has 33 bytes; the socket keeps their bounds and their
order (SOCK_SEQPACKET), and its end is the other process's death. A token says of which refit it is, so that what a
refit that was given up left in the socket is never taken for a token of the next one.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final
from weakref import WeakSet

import torch
from torch import Tensor

from rl_refit import gpu
from rl_refit.errors import PeerError, RefitError
from rl_refit.stores import Store
from rl_refit.transports.base import PATIENCE_S, Numbers, Watch
from rl_refit.transports.peers import Peers, read_key

__all__ = ["SHARED_MEMORY", "Handle", "Key", "Link", "Ring", "Segment", "Token", "close_descriptors", "meet"]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files in it are made without a name, directories for their owner alone
"""Linux's file system for it."""


Key = tuple[int, str, int]
"""The process that owns a ring; "source" for that of its own weights, "relay" for what it received; the reader."""


@dataclass(frozen=True, slots=True)
class Handle:
    """How another process gets the memory of a ring."""

    description: dict[str, Any]
    """As JSON."""

    descriptors: Sequence[int] = ()
    """Of open files, which go along."""


@final
class Segment:
    """`nbytes` of shared memory as `bytes`, uint8 [nbytes].

    Lives as long as any tensor of it.

    Args:
        descriptor: Of the open file; it may be closed afterwards.
        nbytes: Size of the file.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._mapped = mmap.mmap(descriptor, nbytes)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        int(self.bytes[:: mmap.PAGESIZE].sum())  # maps every page, which the first transfer would pay for otherwise

    @classmethod
    def create(cls, directory: str, nbytes: int) -> tuple[Segment, int]:
        """A new segment of zeros in `directory`, and the descriptor of its file, which the caller closes.

        Raises:
            RefitError: The file system has no room for it.
        """
        with tempfile.TemporaryFile(dir=directory) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                    raise
                raise RefitError(_no_room(directory, nbytes), phase="prepare") from error
            descriptor = os.dup(file.fileno())
        segment = cls(descriptor, nbytes)
        segment.bytes[:: mmap.PAGESIZE] = 0
        return segment, descriptor

    def with_own_storage(self, view: Tensor) -> Tensor:
        """The memory of `view`, a contiguous part of the segment, as a tensor whose storage is just this part.

        So that whoever saves or inspects the tensor meets its bytes, and not the whole segment.
        """
        return torch.frombuffer(
            self._mapped, dtype=view.dtype, count=view.numel(), offset=view.data_ptr() - self.bytes.data_ptr()
        ).view(view.shape)


def _no_room(directory: str, nbytes: int) -> str:
    state = os.statvfs(directory)
    return (
        f"shared memory of {nbytes:,} bytes does not fit into {directory}, which has "
        f"{state.f_bavail * state.f_frsize:,} bytes available of {state.f_blocks * state.f_frsize:,}; give it more "
        f"(docker run --shm-size=…, in Kubernetes an emptyDir of medium Memory), or name another directory=, "
        f"or use a ring of smaller or fewer slots"
    )


@final
class Ring:
    """Slots of given sizes, one after the other, as one process sees them.

    Args:
        data: uint8 [the sum of `sizes`], and whatever keeps it alive.
        sizes: Bytes of each slot.
        segment: Where `data` is shared memory.
    """

    def __init__(self, data: Tensor, sizes: Sequence[int], *, segment: Segment | None = None) -> None:
        self.segment = segment
        self._slots = data.split_with_sizes(list(sizes)) if sizes else ()

    @classmethod
    def create(
        cls, sizes: Sequence[int], *, on_gpu: bool, device: torch.device, num_readers: int, directory: str
    ) -> tuple[Ring, list[Handle]]:
        """New slots, and for each process that is to map them a handle; `close_descriptors` afterwards.

        Raises:
            RefitError: There is no room for them, or GPU memory of this process cannot be exported.
        """
        nbytes = sum(sizes)
        if not num_readers:
            return cls(gpu.empty(nbytes, device if on_gpu else torch.device("cpu")), sizes), []
        if not on_gpu:
            segment, descriptor = Segment.create(directory, nbytes)
            handles = [Handle({"sizes": [*sizes]}, (descriptor,))] * num_readers
            return cls(segment.bytes, sizes, segment=segment), handles
        _require_exportable()
        data, uuid = gpu.empty(nbytes, device), gpu.uuids()[gpu.index_of(device)]
        handles = [
            Handle({"sizes": [*sizes], "gpu": uuid, "cuda": _to_plain(gpu.export(data))}) for _ in range(num_readers)
        ]
        return cls(data, sizes), handles

    @classmethod
    def attach(cls, handle: Handle) -> Ring:
        """The slots of another process."""
        sizes = handle.description["sizes"]
        if "cuda" not in handle.description:
            segment = Segment(handle.descriptors[0], sum(sizes))
            return cls(segment.bytes, sizes, segment=segment)
        owner = torch.device("cuda", gpu.uuids().index(handle.description["gpu"]))
        return cls(gpu.import_exported(_from_plain(handle.description["cuda"]), owner), sizes)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Tensor:
        return self._slots[number]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)


def close_descriptors(handles: Iterable[Handle]) -> None:
    """Close what handles of shared memory keep open; the mappings stay."""
    for descriptor in {descriptor for handle in handles for descriptor in handle.descriptors}:
        os.close(descriptor)


def _require_exportable() -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(variable, "")
        if "expandable_segments:true" in setting.lower().replace(" ", ""):
            raise RefitError(
                f"{variable}={setting!r}: memory of expandable segments is shared slowly, and in containers often not "
                f"at all; leave expandable_segments out in the processes that refit",
                phase="prepare",
            )


def _to_plain(export: Sequence[Any]) -> list[Any]:
    """What torch exports, as JSON can say it: bytes become {"base64": …}."""
    return [{"base64": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in export]


def _from_plain(plain: Sequence[Any]) -> list[Any]:
    return [base64.b64decode(x["base64"]) if isinstance(x, dict) else x for x in plain]


# -- Tokens ----------------------------------------------------------------------------------------------------------

_TOKEN = struct.Struct("!4s?IQIIQ")
_MAGIC = b"RLR2"


class Token(NamedTuple):
    """What one process tells another of a bucket."""

    full: bool
    """It is in its slot: read it. Otherwise it is read: its slot may be written."""

    slot: int
    numbers: Numbers

    def __str__(self) -> str:
        return f"{'full' if self.full else 'read'}, {self.numbers}"


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
        _open_links.add(self)

    def send(self, token: Token, watch: Watch) -> None:
        """Send `token`.

        Raises:
            PeerError: The peer is gone.
            RefitError: What `watch.check` raises.
        """
        message = _TOKEN.pack(_MAGIC, token.full, token.slot, *token.numbers)
        while True:
            try:
                self._socket.send(message)
                return
            except BlockingIOError:
                watch.peer = self.peer
                watch.check()
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                poll.poll(1e3 * min(PATIENCE_S, watch.remaining_s))
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
        while True:
            try:
                message = self._socket.recv(_TOKEN.size + 1)
            except BlockingIOError:
                return None
            except OSError as error:
                raise self._gone(watch) from error
            if not message:
                raise self._gone(watch)
            got = None
            if len(message) == _TOKEN.size and message.startswith(_MAGIC):
                _, full, slot, *numbers = _TOKEN.unpack(message)
                got = Token(full, slot, Numbers(*numbers))
                if got.full == token.full and got.numbers == token.numbers:
                    return got
            if got is None or got.numbers.refit >= token.numbers.refit:
                came = got or f"{len(message)} bytes: {message[:8]!r}"
                raise RefitError(
                    f"expected from {self.peer} the token ({token}), and got ({came}): "
                    f"a bucket was lost, sent twice or sent out of order",
                    phase=watch.phase_name,
                    bucket=token.numbers.bucket,
                    peer=self.peer,
                )

    def close(self) -> None:
        """Close this end; the peer sees it as this process's death."""
        self._socket.close()

    def _gone(self, watch: Watch) -> RefitError:
        watch.await_reason(self.peer)
        return PeerError(
            f"{self.peer} is gone: its process is dead, or closed its transport without a reason ({watch.where()})",
            phase=watch.phase_name,
            bucket=watch.bucket,
            peer=self.peer,
        )


_open_links: WeakSet[Link] = WeakSet()


def _close_links() -> None:
    """A forked child, such as a worker of a data loader, would keep sockets open beyond its parent's death."""
    for link in tuple(_open_links):
        link.close()


os.register_at_fork(after_in_child=_close_links)


# -- How they meet ---------------------------------------------------------------------------------------------------

_LONGEST_HANDLE = 65536
_PAUSE_S = 2e-3
_GRACE_S = 2.0
"""A socket that is not where its owner says it is for so long is not on this machine's file system."""


def meet(
    handles: Mapping[Key, Handle],
    wanted: Sequence[Key],
    *,
    peers: Peers,
    store: Store,
    watch: Watch,
    directory: str,
) -> tuple[dict[Key, Link], dict[Key, Handle]]:
    """Connect this process with the readers of its rings and the owners of those that it reads; hand over memory.

    Args:
        handles: For each reader of a ring of this process, how it gets the memory.
        wanted: The rings of others that this process reads.
        peers: Who is who.
        store: Where owners say at which socket they listen.
        watch: Looked at while waiting.
        directory: Where the private directory is made.

    Returns:
        A link for each key; and the handle of each wanted one, whose descriptors are the caller's to close.

    Raises:
        RefitError: A peer died, or cannot be reached; or `watch.check` raises.
    """
    connections: dict[Key, socket.socket] = {}
    listening = _listening(directory, peers, store, connections=len(handles))
    with listening if handles else contextlib.nullcontext() as listener:
        try:
            # A connection needs no answer from who listens, so nobody waits here for a party that waits as well.
            for key in wanted:
                connections[key] = _connect(key, peers, store, watch=watch)
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
