"""`SlotStream`: weights travel in slots, over the medium that each pair of processes has.

A source rank fills a ring of slots, bucket after bucket, in the order of the schedule. Each process that needs a bucket
gets it from there: those of the same host map the ring and read the slot in place; to the others it is sent, into a
slot of a ring of theirs, which the rest of that host maps in turn. Media are chosen for each pair of processes, in
`rl_refit.transports.peers`, so that one refit uses CUDA IPC within a node and NCCL between nodes.

    mapped    a token says that a slot is full, and one back that it is read     memory.py
    sent      a header says what is in it, and the send ends when it has left    messages.py

A slot is filled again when all that it was for are through with it. Nobody waits in a circle: of all streams that are
not through, the first is the next one of all its ends, each ring is used in the order of the schedule, and sending
never waits for receiving in the same process. Where messages have but their order, both begin in that of the schedule.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from time import monotonic, sleep
from typing import Any, final

import torch
from torch import Tensor, nn

from rl_refit import gpu
from rl_refit.buckets import ALIGNMENT, Piece, size_of
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.module_tensors import ModuleReader, Rename
from rl_refit.transports.base import PATIENCE_S, Channel, Inbox, Numbers, Outbox, Watch, slot_view
from rl_refit.transports.memory import SHARED_MEMORY, Handle, Key, Link, Ring, Token, close_descriptors, meet
from rl_refit.transports.messages import HEADER_BYTES, Group, MessageKind, check_header, connect, write_header
from rl_refit.transports.peers import Hop, Peer, Peers, hops_of, join

__all__ = ["SlotStream", "Traffic"]

_GRACE_S = 1.0  # a GPU that copies a slot for longer hangs
_MIN_POLL_INTERVAL_S, _MAX_POLL_INTERVAL_S = 1e-4, 2e-3


@dataclass(slots=True)
class Traffic:
    """What one process moved in its last transfer, in bytes of weights."""

    received: int = 0
    """From other processes: read in their slots, or sent by them."""

    relayed: int = 0
    """To other processes, as a sink that hands on what it received; what several read in one slot counts once."""

    copied: int = 0
    """From this process's own source to its own sink, without a slot."""


@final
class SlotStream:
    """The way of weights between processes, on one host or over many. A `Transport`.

    Takes `buckets` slots of `bucket_bytes` and a header in a process that is a source, and as many in one that receives
    messages; in GPU memory where all parties are on GPUs, otherwise in the host's.

    Args:
        arena: Whether each source rank has a place for everything that it sends, instead of a ring: sinks then keep
            what lies there until they commit, and copy it once. All parties say the same.
        hold: A module of plain CPU tensors, the policy, to `adopt` as soon as the arena is there; makes an arena.
        rename: For `hold`, as for `ModuleSource`.
        share_memory: Whether processes of one host map each other's memory. False where they are in containers that
            share none; source 0's choice holds for all.
        host: Where gloo listens: a name or an address of this machine, other machines give theirs. Loopback where
            it is not given.
        directory: A file system in memory, for slots and for the sockets while processes meet.
    """

    def __init__(
        self,
        *,
        arena: bool = False,
        hold: nn.Module | None = None,
        rename: Rename | None = None,
        share_memory: bool = True,
        host: str | None = None,
        directory: str = SHARED_MEMORY,
    ) -> None:
        self.bounded = not arena and hold is None
        """Whether slots are used again."""
        self.name = "ring of slots" if self.bounded else "arena"
        self._hold, self._rename = hold, rename
        self.options: dict[str, Any] = {
            "arena": not self.bounded,
            "share_memory": share_memory,
            "host": host,
            "directory": directory,
        }
        """What another process makes the same transport of, as plain data."""
        self._open: _Opened | None = None
        self._adopted_bytes = 0
        self.traffic = Traffic()
        """What this process moved in its last transfer."""

    @property
    def medium(self) -> str:
        """What carries the weights between this process and others: "shared memory", "CUDA IPC and NCCL"."""
        media = [] if self._open is None else self._open.media
        return " and ".join(media) or "in process"

    @property
    def extra_bytes(self) -> int:
        """Bytes of this process's slots that are not its module's own parameters; what others own is theirs."""
        opened = self._open
        return 0 if opened is None else opened.own.nbytes + opened.relay.nbytes - self._adopted_bytes

    def open(self, channel: Channel, watch: Watch) -> None:
        """Agree on the media, allocate the slots, connect, and move `hold` into the arena.

        Raises:
            RefitError: A peer is not there or cannot be reached, slots find no room, a device has no medium, or `hold`
                cannot be moved.
        """
        self.close()
        peers = join(channel, watch, maps=self.options["share_memory"])
        self._open = _Opened(channel, peers, bounded=self.bounded)
        try:
            if peers is not None:
                self._open.connect(peers, watch, self.options)
        except BaseException:
            self.close()
            raise
        if self._hold is not None and channel.source_rank is not None:
            self.adopt(self._hold, rename=self._rename)

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams, sending and receiving at once.

        Raises:
            PeerError: A peer is gone or silent.
            RefitError: A bucket was dropped, duplicated or reordered; an earlier transfer failed; or a side broke its
                promises.
        """
        opened = self._open
        if opened is None:
            raise RefitError("this transport is closed; open it before a transfer", phase=watch.phase_name)
        if opened.broken is not None:
            raise RefitError(
                f"this transport is broken since a transfer failed ({opened.broken}): messages or copies under way "
                f"cannot be called back; make a new Refit",
                phase="transfer",
            )
        self.traffic = Traffic()
        transfer = _Transfer(opened, outbox, inbox, watch, self.traffic)
        try:
            transfer.run()
        except BaseException as error:
            # Others, once they hear of it, fill slots again, and memory may go: so what is being copied ends before.
            is_copied, until = gpu.record(opened.channel.device), monotonic() + _GRACE_S
            while not (copied := is_copied()) and monotonic() < until:
                sleep(_MIN_POLL_INTERVAL_S)
            if opened.group is not None or not copied:
                opened.broken = f"{type(error).__name__}: {error}"
            raise

    def finish(self) -> None:
        """After a transfer that failed, close the connections: earlier, and it would look like a death."""
        if self._open is not None and self._open.broken is not None:
            self._open.disconnect()

    def close(self) -> None:
        """Close the connections and free the slots, except what parameters live in; waits for nobody."""
        if self._open is not None:
            self._open.disconnect()
        self._open, self._adopted_bytes = None, 0

    def adopt(self, module: nn.Module, *, rename: Rename | None = None) -> int:
        """Move the memory of `module`'s tensors into the arena, values and all; return the bytes moved.

        Afterwards a refit copies nothing on this side. Parameters stay the same objects, so optimizers and ties hold;
        addresses change, so adopt before capturing graphs. What this rank does not send stays where it is. The arena
        lives as long as a parameter in it, also after `close`.

        Works for plain, contiguous CPU tensors. Refuses by name, before it moves any, what it cannot move: DTensors
        (FSDP2, tensor parallelism), tensors that share memory without being tied, and those of which this rank sends
        but a part.

        Raises:
            RefitError: There is no arena, or a tensor cannot be moved; the message lists all.
        """
        places = {} if self._open is None or self.bounded else self._open.places()
        segment = None if self._open is None else self._open.own.segment
        if not places:
            raise RefitError("this process has no arena: it is no source, or the transport is not open")
        moves = _moves(module, rename, places)
        with torch.no_grad():
            for place, tensors in moves:
                place.copy_(tensors[0])
                home = place if segment is None else segment.with_own_storage(place)
                for tensor in tensors:
                    tensor.data = home
        self._adopted_bytes = sum(place.nbytes for place, _ in moves)
        return self._adopted_bytes


# -- What lies between `open` and `close` ------------------------------------------------------------------------------


class _Opened:
    """The slots, links and messages of one process."""

    def __init__(self, channel: Channel, peers: Peers | None, *, bounded: bool) -> None:
        self.channel = channel
        self.bounded = bounded
        self.process = 0 if peers is None else peers.own
        self.broken: str | None = None
        streams = channel.schedule.streams if peers is not None else ()
        hops = [] if peers is None else [hops_of(stream, peers) for stream in streams]
        self.hops = hops
        mine = [] if peers is None else [of[peers.own] for of in hops if peers.own in of]
        self.sent = tuple(hop for hop in mine if hop.origin is None)
        self.received = tuple(hop for hop in mine if hop.origin is not None)
        self.own = self.relay = Ring(torch.empty(0, dtype=torch.uint8), ())
        self.rings: dict[Key, Ring] = {}
        """Rings of other processes, mapped."""
        self.links: dict[Key, Link] = {}
        self.group: Group | None = None
        self.is_ordered = False
        """Whether messages are told apart by their order alone; see `Group`."""
        self.media: list[str] = []
        self.news, self.tell = socket.socketpair()
        self.news.setblocking(False)
        self.tell.setblocking(False)

    def connect(self, peers: Peers, watch: Watch, options: Mapping[str, Any]) -> None:
        """Allocate the slots, and connect with whoever shares a stream; as the `options` of `SlotStream` say."""
        own, directory = peers.own, options["directory"]
        # An arena has a slot for each bucket, this process's own sink alone included; a ring none for nobody else.
        filled = [hop for hop in self.sent if hop.readers or hop.receivers or not self.bounded]
        messages = [hop for hop in self.received if not hop.is_mapped]
        sizes = {"source": self._sizes(filled, all_of_them=not self.bounded), "relay": self._sizes(messages)}
        readers = {
            "source": sorted({reader for hop in self.sent for reader, _ in hop.readers}),
            "relay": sorted({reader for hop in self.received for reader, _ in hop.readers}),
        }
        handles: dict[Key, Handle] = {}
        try:
            for name, of_readers in readers.items():
                adopts = name == "source" and not self.bounded and not peers.on_gpus
                ring, given = Ring.create(
                    sizes[name],
                    on_gpu=peers.on_gpus,
                    device=self.channel.device,
                    num_readers=max(len(of_readers), int(adopts and bool(sizes[name]))),
                    directory=directory,
                )
                self.own, self.relay = (ring, self.relay) if name == "source" else (self.own, ring)
                handles |= {(own, name, reader): handle for reader, handle in zip(of_readers, given, strict=False)}
                if len(given) > len(of_readers):
                    close_descriptors(given)
            wanted = dict.fromkeys(self.key_of(hop) for hop in self.received if hop.is_mapped)
            if handles or wanted:
                assert self.channel.store is not None  # or `join` would have refused other processes
                self.links, received = meet(
                    handles, [*wanted], peers=peers, store=self.channel.store, watch=watch, directory=directory
                )
                try:
                    self.rings = {key: Ring.attach(handle) for key, handle in received.items()}
                finally:
                    close_descriptors(received.values())
        finally:
            close_descriptors(handles.values())
        pairs = [(process, to[0]) for of in self.hops for process, hop in of.items() for to in hop.receivers]
        if pairs:
            self.group = connect(pairs, peers, self.channel, watch=watch, host=options["host"], news=self.tell)
            self.is_ordered = self.group is not None and self.group.is_ordered
        others = {peer[0] for hop in (*self.sent, *self.received) for peer in (*hop.readers, *hop.receivers)}
        media = [peers.medium(own, other) for other in sorted(others)]
        media += [peers.medium(hop.origin[0], own) for hop in self.received if hop.origin is not None]
        self.media = [*dict.fromkeys(media)]

    def key_of(self, hop: Hop) -> Key:
        """Which ring this process reads for a hop whose origin it maps."""
        assert hop.origin is not None
        return hop.origin[0], "source" if hop.origin[1].startswith("source") else "relay", self.process

    def _sizes(self, hops: Iterable[Hop], *, all_of_them: bool = False) -> list[int]:
        """Of the slots of a ring: no larger, and no more of them, than the buckets need."""
        buckets = [bucket for hop in hops for bucket in hop.stream.buckets]
        nbytes = [HEADER_BYTES + -(-size_of(bucket) // ALIGNMENT) * ALIGNMENT for bucket in buckets]
        return nbytes if all_of_them else [max(nbytes, default=0)] * min(self.channel.slots, len(nbytes))

    def places(self) -> dict[Region, Tensor]:
        """Of an arena: each box that this process sends, in its slot."""
        dtypes = self.channel.schedule.dtypes
        buckets = [bucket for hop in self.sent for bucket in hop.stream.buckets]
        return {
            piece.region: slot_view(self.own[number][HEADER_BYTES:], piece, dtypes[piece.region.name])
            for number, bucket in enumerate(buckets)
            for piece in bucket
        }

    def disconnect(self) -> None:
        """Close what is connected."""
        for link in self.links.values():
            link.close()
        if self.group is not None:
            self.group.close()
        self.links, self.group = {}, None
        self.news.close()
        self.tell.close()


# -- One transfer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Something that must happen before a task goes on."""

    bucket: int
    peer: str | None
    """For whom; None for the other task of this process."""

    look: Callable[[], Any]
    """Something true once it has happened; raises what went wrong."""

    link: Link | None = None
    """Becomes readable when it may have happened."""

    is_told: bool = True
    """Whether a link or `news` becomes readable then. Otherwise, as of a GPU, it is to be looked at again and again."""


_Task = Generator[_Wait, None, None]

_Position = tuple[float, int]
"""Number of the stream and of the bucket: where a task is in the schedule."""

_END: _Position = (float("inf"), 0)


@dataclass(frozen=True)
class _Transfer:
    """One transfer of one process."""

    opened: _Opened
    outbox: Outbox | None
    inbox: Inbox | None
    watch: Watch
    traffic: Traffic
    positions: dict[str, _Position] = field(default_factory=dict)

    def run(self) -> None:
        """Run both tasks in turns until all is through; looks at the watch whenever none can go on."""
        opened = self.opened
        tasks = {"send": self.send(), "receive": self.receive()}
        self.positions.update(send=(-1, 0), receive=(-1, 0))
        pause_s = _MIN_POLL_INTERVAL_S
        before: list[_Wait] = []
        while tasks:
            with contextlib.suppress(BlockingIOError):
                while opened.news.recv(4096):
                    pass
            waits: list[_Wait] = []
            for name, task in tuple(tasks.items()):
                wait = next(task, None)
                if wait is None:
                    del tasks[name]
                    self.positions[name] = _END
                else:
                    waits.append(wait)
            if not waits:
                continue
            first = next((wait for wait in waits if wait.peer is not None), waits[0])
            self.watch.at(bucket=first.bucket, peer=first.peer)
            self.watch.check()
            if all(wait.is_told for wait in waits):
                limit_s = min(PATIENCE_S, max(self.watch.remaining_s, _MIN_POLL_INTERVAL_S))
            else:
                pause_s = min(2 * pause_s, _MAX_POLL_INTERVAL_S) if waits == before else _MIN_POLL_INTERVAL_S
                limit_s = pause_s
            before = waits
            poll = select.poll()
            poll.register(opened.news, select.POLLIN)
            for wait in waits:
                if wait.link is not None:
                    poll.register(wait.link.fileno(), select.POLLIN)
            poll.poll(1e3 * limit_s)

    def send(self) -> _Task:
        """Fill slots with this process's own streams, and copy what it sends to itself."""
        opened, outbox = self.opened, self.outbox
        if outbox is None:
            return
        ring, turns = opened.own, itertools.count()
        in_use: dict[int, list[_Wait]] = {}
        for hop in opened.sent:
            for number, pieces in itertools.groupby(outbox.pieces(hop.stream), key=itemgetter(0)):
                self.watch.check()
                self.watch.at(bucket=number)
                bucket = hop.stream.buckets[number]
                if opened.bounded and not hop.readers and not hop.receivers:
                    self._copy(pieces)
                    continue
                turn = next(turns) % len(ring)
                for wait in in_use.pop(turn, ()):
                    yield from _until(wait)
                self._fill(ring[turn], hop, pieces)
                yield from self._until_copied(number)
                numbers = Numbers(outbox.refit, hop.stream.number, number, size_of(bucket))
                if hop.receivers:
                    write_header(ring[turn], numbers)
                    yield from self._await_order("send", "receive", numbers)
                in_use[turn] = self._hand_on(ring, turn, hop, numbers=numbers)
        # In the order in which slots were filled: what is filled anew is put at the end.
        for wait in itertools.chain.from_iterable(in_use.values()):
            yield from _until(wait)

    def receive(self) -> _Task:
        """Read slots of others, receive messages, and hand on what others of this host need."""
        opened, inbox = self.opened, self.inbox
        if inbox is None:
            return
        due = deque(
            (hop, Numbers(inbox.refit, hop.stream.number, number, size_of(bucket)))
            for hop in opened.received
            for number, bucket in enumerate(hop.stream.buckets)
        )
        free = deque(range(len(opened.relay)))
        begun: deque[tuple[Hop, Numbers, int | None, _Wait]] = deque()
        while due or begun:
            while due and (due[0][0].is_mapped or free):
                if begun and begun[-1][0].receivers and opened.is_ordered:  # what is sent on comes before the next
                    break
                hop, numbers = due[0]
                if hop.is_mapped:
                    if begun:  # nothing is gained by asking early
                        break
                    self.positions["receive"] = numbers.stream, numbers.bucket
                else:
                    order = self._await_order("receive", "send", numbers)
                    if (wait := next(order, None)) is not None:
                        if begun:
                            break
                        yield wait
                        continue
                due.popleft()
                slot = None if hop.is_mapped else free.popleft()
                begun.append((hop, numbers, slot, self._expect(hop, numbers, slot)))
            hop, numbers, slot, wait = begun.popleft()
            token = yield from _until(wait)
            self.watch.check()
            self.watch.at(bucket=wait.bucket, peer=wait.peer)
            bucket = hop.stream.buckets[numbers.bucket]
            payload = sum(piece.nbytes for piece in bucket)
            self.traffic.received += payload
            if slot is None:
                full = opened.rings[opened.key_of(hop)][token.slot]
                inbox.deliver(bucket, full[HEADER_BYTES:], stays=not opened.bounded)
                yield from self._until_copied(numbers.bucket)
                opened.links[opened.key_of(hop)].send(token._replace(full=False), self.watch)
            else:
                check_header(opened.relay[slot], numbers, wait.peer or "")
                handed_on = self._hand_on(opened.relay, slot, hop, numbers=numbers)
                self.traffic.relayed += payload * (len(hop.receivers) + bool(hop.readers))
                inbox.deliver(bucket, opened.relay[slot][HEADER_BYTES:])
                yield from self._until_copied(numbers.bucket)
                for wait in handed_on:
                    yield from _until(wait)
                free.append(slot)

    def _expect(self, hop: Hop, numbers: Numbers, slot: int | None) -> _Wait:
        """Begin to receive a bucket into `slot`; without one, wait for the token that says that it can be read."""
        assert hop.origin is not None
        if slot is None:
            return self._token(self.opened.key_of(hop), Token(full=True, slot=0, numbers=numbers))
        ring = self.opened.relay
        # Gloo takes what is shorter than promised, and the header then tells; NCCL takes what was promised.
        target = ring[slot][: HEADER_BYTES + numbers.nbytes] if self.opened.is_ordered else ring[slot]
        return self._message("receive", target, hop.origin, numbers=numbers)

    def _token(self, key: Key, token: Token) -> _Wait:
        """Until `token` comes, in any slot; and which came."""
        link = self.opened.links[key]
        return _Wait(token.numbers.bucket, link.peer, lambda: link.take(token, self.watch), link)

    def _message(self, kind: MessageKind, slot: Tensor, peer: Peer, *, numbers: Numbers) -> _Wait:
        """Begin a message, and wait until it has ended."""
        group = self.opened.group
        assert group is not None
        # The same for all buckets of a stream, so that one that is missing is noticed at the next, by its header.
        tag = numbers.refit * len(self.opened.channel.schedule.streams) + numbers.stream
        message = group.begin(kind, slot, peer, bucket=numbers.bucket, tag=tag)
        look = partial(group.has_ended, message, self.watch)
        return _Wait(numbers.bucket, peer[1], look, is_told=not group.is_ordered)

    def _await_order(self, own: str, other: str, numbers: Numbers) -> _Task:
        """Note that task `own` is at a bucket; where messages have but their order, wait until `other` is there too."""
        self.positions[own] = position = numbers.stream, numbers.bucket
        if self.opened.is_ordered:
            yield from _until(_Wait(numbers.bucket, None, lambda: self.positions[other] >= position, is_told=False))

    def _fill(self, slot: Tensor, hop: Hop, pieces: Iterable[tuple[int, Piece, Tensor]]) -> None:
        """Pack a bucket into `slot`, and give this process's own sink what it needs of it."""
        for number, piece, tensor in pieces:
            self.watch.at(bucket=number)
            place = slot_view(slot[HEADER_BYTES:], piece, tensor.dtype)
            if place.data_ptr() != tensor.data_ptr() or place.stride() != tensor.stride():  # a parameter may live there
                place.copy_(tensor)
            if hop.delivers_here:
                assert self.inbox is not None
                self.inbox.put(piece.region, place, stays=not self.opened.bounded)
                self.traffic.copied += piece.nbytes

    def _copy(self, pieces: Iterable[tuple[int, Piece, Tensor]]) -> None:
        """From this process's source to its own sink, which nobody else shares."""
        assert self.outbox is not None
        assert self.inbox is not None
        for number, piece, tensor in pieces:
            self.watch.at(bucket=number)
            self.inbox.put(piece.region, tensor, stays=self.outbox.stays)
            self.traffic.copied += piece.nbytes

    def _hand_on(self, ring: Ring, slot: int, hop: Hop, *, numbers: Numbers) -> list[_Wait]:
        """Tell the readers of a full slot and begin to send it; returns what must be over before the slot is free."""
        opened = self.opened
        name = "source" if hop.origin is None else "relay"
        kind: MessageKind = "send" if hop.origin is None else "relay"
        waits: list[_Wait] = []
        token = Token(full=True, slot=slot, numbers=numbers)
        for reader, _ in hop.readers:
            key = opened.process, name, reader
            opened.links[key].send(token, self.watch)
            waits.append(self._token(key, token._replace(full=False)))
        full = ring[slot][: HEADER_BYTES + numbers.nbytes]
        return waits + [self._message(kind, full, receiver, numbers=numbers) for receiver in hop.receivers]

    def _until_copied(self, bucket: int) -> _Task:
        """Whoever is told of a slot next may be another process, and knows nothing of this one's streams."""
        is_copied = gpu.record(self.opened.channel.device)
        yield from _until(_Wait(bucket, "this process's own GPU", is_copied, is_told=False))


def _until(wait: _Wait) -> Generator[_Wait, None, Any]:
    """Yield `wait` until it is over, and return what it found."""
    while not (found := wait.look()):
        yield wait
    return found


# -- A module whose parameters live in the arena ----------------------------------------------------------------------


def _moves(
    module: nn.Module, rename: Rename | None, places: Mapping[Region, Tensor]
) -> list[tuple[Tensor, list[Tensor]]]:
    """For each place in the arena the tensors of `module`, tied ones together, that are to live there."""
    sent = {region.name: (region, place) for region, place in places.items()}
    read = ModuleReader(module, rename=rename).read()
    tied: dict[str, list[str]] = {}
    for meta in read.manifest.tensors:
        tied.setdefault(meta.tied_to or meta.name, []).append(meta.name)
    moves: list[tuple[Tensor, list[Tensor]]] = []
    refused = [f"{name} (the module has no such tensor)" for name in sent if name not in read.objects]
    for names in tied.values():
        region, place = next((sent[name] for name in names if name in sent), (None, None))
        if region is not None and place is not None:
            reasons = {name: _why_not(read.objects[name], region, place) for name in names}
            refused += [f"{name} ({reason})" for name, reason in reasons.items() if reason]
            moves.append((place, [read.objects[name] for name in names]))
    if refused:
        raise RefitError(
            f"these cannot live in the arena, so nothing was moved; a refit works without: {', '.join(refused)}"
        )
    return moves


def _why_not(tensor: Tensor, region: Region, place: Tensor) -> str | None:
    """The first reason why `tensor` cannot live at `place`; None where it can."""
    plain = type(tensor.data) is Tensor
    reasons = (
        (not plain, f"a {type(tensor.data).__name__}, not a plain tensor"),
        (tensor.device.type != "cpu", f"on {tensor.device}"),
        (not tensor.is_contiguous(), f"not contiguous, strides {tensor.stride()}"),
        (plain and tensor.untyped_storage().nbytes() != tensor.nbytes, "a view into larger memory"),
        (tensor.dtype != place.dtype, f"{tensor.dtype}, and sent as {place.dtype}"),
        (tuple(tensor.shape) != region.shape, f"this rank sends {list(region.shape)} of it"),
    )
    return next((reason for holds, reason in reasons if holds), None)
