"""Each sink rank receives its own boxes and nothing else, over torch.distributed's sends and receives.

Each process has a ring of slots to send from and one to receive into, and works through its streams in the order of the
schedule, sending and receiving at once. What a process sends to itself it copies. The first of several sink ranks of a
stream hands each bucket on to the others as soon as it has it.

Nobody waits in a circle: of all streams that are not through, the first is the next one of all its ends, each ring is
used in the order of the schedule, and a send never waits for a receive of the same process.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_refit.buckets import ALIGNMENT, Piece, size_of
from rl_refit.errors import RefitError
from rl_refit.schedule import Routing, Stream
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch, slot_view
from rl_refit.transports.groups import Address, Group, backend_for
from rl_refit.transports.process_group import Session, connect
from rl_refit.transports.seating import Hop, Seating, hop_of
from rl_refit.transports.wire import (
    HEADER_BYTES,
    Message,
    Numbers,
    Task,
    Traffic,
    check_header,
    payload_of,
    slots_of,
    write_header,
)

__all__ = ["PointToPoint"]

_TAGS = 2**30
_Hops = tuple[tuple[Stream, Hop], ...]


@final
class PointToPoint:
    """Sends and receives over a process group of the refit's own: gloo for CPU tensors, NCCL for CUDA. A `Transport`.

    A process that is a rank of both sides has a ring of slots for each.

    Args:
        group: A process group that has all parties in it, to be used instead of one of its own. Nothing else may use it
            during a refit, and a refit that fails breaks it.
        host: Where gloo listens: a name or an address of this machine, other machines give theirs. Loopback where
            neither is given.
        interface: The same as a network interface, such as "eth0".

    Raises:
        ValueError: Both `host` and `interface` are given.
    """

    routing: Routing = "unicast"
    bounded = True

    def __init__(
        self, *, group: ProcessGroup | None = None, host: str | None = None, interface: str | None = None
    ) -> None:
        self.name = "point-to-point"
        self._group = group
        self._address = Address(host=host, interface=interface)
        self._session: Session | None = None

    @property
    def traffic(self) -> Traffic:
        """What this process moved in its last transfer."""
        return Traffic() if self._session is None else self._session.traffic

    @property
    def extra_bytes(self) -> int:
        """Bytes of the slots."""
        return 0 if self._session is None else self._session.nbytes

    def open(self, channel: Channel, watch: Watch) -> None:
        """Agree on the seats, connect, allocate the slots.

        Raises:
            RefitError: A peer is not there, or the device has no backend.
        """
        self.close()
        self.name = f"point-to-point over {backend_for(channel.device)}"
        streams = channel.schedule.streams
        self._session = session = connect(
            channel,
            watch,
            group=self._group,
            address=self._address,
            members=partial(_members, streams, channel.device),
            greet=partial(_greet, streams),
        )
        if self._group is not None and session.seating is not None:
            _require_one_lane(streams, session.seating, channel.device)
        hops = [] if session.seating is None else [(s, hop_of(s, session.seating)) for s in streams]
        self._sent = tuple((s, hop) for s, hop in hops if hop is not None and hop.origin is None)
        self._received = tuple((s, hop) for s, hop in hops if hop is not None and hop.origin is not None)
        for mine in (tuple(pair for pair in self._sent if pair[1].targets), self._received):
            buckets = [size_of(bucket) for stream, _ in mine for bucket in stream.buckets]
            session.slots.append(slots_of(max(buckets, default=0), min(channel.slots, len(buckets)), channel.device))

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams, sending and receiving at once.

        Raises:
            PeerError: A connection is lost.
            RefitError: A bucket was dropped, duplicated or reordered; an earlier transfer failed; or a side broke its
                promises.
        """
        session = self._session
        if session is None:
            raise RefitError("this transport is closed; open it before a transfer", phase=watch.phase_name)
        tasks: list[Task] = []
        if session.seating is not None:
            mine = _Transfer(session=session, seating=session.seating, outbox=outbox, inbox=inbox, watch=watch)
            tasks += [mine.send(self._sent)] if self._sent else []
            tasks += [mine.receive(self._received)] if self._received else []
        session.run(tasks, watch)

    def finish(self) -> None:
        """After a transfer that failed, close the connections."""
        if self._session is not None:
            self._session.finish()

    def close(self) -> None:
        """Close the connections and free the slots; waits for nobody."""
        if self._session is not None:
            self._session.close()
        self._session = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """One transfer of one process."""

    session: Session
    seating: Seating
    outbox: Outbox | None
    inbox: Inbox | None
    watch: Watch

    def send(self, streams: _Hops) -> Task:
        """Send this process's own streams, and copy what it sends to itself."""
        assert self.outbox is not None
        ring = self.session.slots[0]
        under_way: list[list[Message]] = [[] for _ in ring]
        turns = itertools.count()
        for stream, hop in streams:
            for number, pieces in itertools.groupby(self.outbox.pieces(stream), key=itemgetter(0)):
                if not hop.targets:
                    self._fill(None, hop, pieces)
                    continue
                turn = next(turns) % len(ring)
                yield from self.session.wire.until_all(under_way[turn], self.watch)
                self._fill(ring[turn], hop, pieces)
                numbers = (self.outbox.refit, stream.number, number, size_of(stream.buckets[number]))
                write_header(ring[turn], numbers)
                under_way[turn] = self._pass_on(ring[turn], hop, numbers)
                self.session.traffic.sent += payload_of(stream.buckets[number]) * len(hop.targets)
        for messages in under_way:
            yield from self.session.wire.until_all(messages, self.watch)

    def receive(self, streams: _Hops) -> Task:
        """Receive from others, and relay."""
        assert self.inbox is not None
        due = (
            (stream, hop, (self.inbox.refit, stream.number, number, size_of(bucket)))
            for stream, hop in streams
            for number, bucket in enumerate(stream.buckets)
        )
        under_way: deque[tuple[Tensor, Stream, Hop, Numbers, Message]] = deque()
        for slot in self.session.slots[1]:
            for stream, hop, numbers in itertools.islice(due, 1):
                under_way.append((slot, stream, hop, numbers, self._expect(slot, hop, numbers)))
        while under_way:
            slot, stream, hop, numbers, message = under_way.popleft()
            yield from self.session.wire.until(message, self.watch)
            self.watch.check()
            self.watch.at(bucket=message.bucket, peer=message.peer)
            check_header(slot, numbers, message.peer)
            handed_on = self._pass_on(slot, hop, numbers)
            bucket = stream.buckets[message.bucket]
            self.inbox.deliver(bucket, slot[HEADER_BYTES:])
            self.session.traffic.count_received(bucket)
            self.session.traffic.relayed += payload_of(bucket) * len(hop.targets)
            yield from self.session.wire.until_all(handed_on, self.watch)
            for stream, hop, numbers in itertools.islice(due, 1):
                under_way.append((slot, stream, hop, numbers, self._expect(slot, hop, numbers)))

    def _fill(self, slot: Tensor | None, hop: Hop, pieces: Iterable[tuple[int, Piece, Tensor]]) -> None:
        """Pack a bucket into `slot`, where others need it, and copy what this process's own sink needs of it."""
        self.watch.check()
        for number, piece, tensor in pieces:
            self.watch.at(bucket=number)
            if slot is not None:
                slot_view(slot[HEADER_BYTES:], piece, tensor.dtype).copy_(tensor)
            if hop.delivers_here:
                assert self.inbox is not None
                self.inbox.put(piece.region, tensor, stays=self.outbox is not None and self.outbox.stays)
                self.session.traffic.copied += piece.nbytes

    def _pass_on(self, slot: Tensor, hop: Hop, numbers: Numbers) -> list[Message]:
        """Begin to send the bucket in `slot` to all targets of `hop`."""
        relayed = hop.origin is not None
        messages = []
        for process, peer in hop.targets:
            group = self._group((self.seating.own, process), relayed=relayed)
            send = partial(group.send, slot[: HEADER_BYTES + numbers[3]], process, self._tag(numbers))
            line = "relay" if relayed else "send"
            messages.append(self.session.wire.begin(send, group=group, line=line, numbers=numbers, peer=peer))
        return messages

    def _expect(self, slot: Tensor, hop: Hop, numbers: Numbers) -> Message:
        """Begin to receive a bucket into `slot`."""
        assert hop.origin is not None
        process, peer = hop.origin
        group = self._group((process, self.seating.own), relayed=peer.startswith("sink"))
        # Gloo takes what is shorter than promised, and the header then tells; NCCL takes what was promised.
        target = slot if group.waits else slot[: HEADER_BYTES + numbers[3]]
        receive = partial(group.receive, target, process, self._tag(numbers))
        return self.session.wire.begin(receive, group=group, line="receive", numbers=numbers, peer=peer)

    def _group(self, way: tuple[int, int], *, relayed: bool) -> Group:
        return self.session.groups[_lane(self.session.channel.device, way, relayed=relayed)]

    def _tag(self, numbers: Numbers) -> int:
        """The same for all buckets of a stream, so that one that is missing is noticed at the next, by its header."""
        return (numbers[0] * len(self.session.channel.schedule.streams) + numbers[1]) % _TAGS


def _lane(device: torch.device, way: tuple[int, int], *, relayed: bool) -> str:
    """The name of the group for messages from one process to another.

    Gloo tells messages apart by their tags. NCCL knows no tags, and does what is between two processes one after the
    other: there each kind of message, in each direction, needs a group of its own for both ends to have one order.
    """
    if device.type != "cuda":
        return "all"
    return f"{'relayed' if relayed else 'direct'} {'up' if way[0] < way[1] else 'down'}"


def _links(streams: Iterable[Stream], seating: Seating, device: torch.device) -> dict[tuple[str, int, int], None]:
    """Every lane and way that any process uses, in the order of the schedule."""
    links: dict[tuple[str, int, int], None] = {}
    for stream in streams:
        senders = (seating.process_of("source", stream.source_rank), seating.process_of("sink", stream.sink_ranks[0]))
        for own in dict.fromkeys(senders):
            hop = hop_of(stream, replace(seating, own=own))
            assert hop is not None
            for process, _ in hop.targets:
                links[_lane(device, (own, process), relayed=hop.origin is not None), own, process] = None
    return links


def _require_one_lane(streams: Iterable[Stream], seating: Seating, device: torch.device) -> None:
    """One NCCL group has one order for all that is between two processes, which several lanes would break."""
    lanes: dict[frozenset[int], str] = {}
    for lane, sender, receiver in _links(streams, seating, device):
        if lanes.setdefault(frozenset((sender, receiver)), lane) != lane:
            raise RefitError(
                f"{seating.name_of(sender)} and {seating.name_of(receiver)} send to one another, or relay: over NCCL "
                f"that needs groups of the refit's own; leave out the argument group",
                phase="prepare",
            )


def _members(streams: tuple[Stream, ...], device: torch.device, seating: Seating) -> dict[str, tuple[int, ...]]:
    everyone = tuple(sorted(set(seating.processes.values())))
    return {lane: everyone for lane, _, _ in _links(streams, seating, device)}


def _greet(streams: tuple[Stream, ...], groups: Mapping[str, Group]) -> None:
    """Send a few bytes each way that will be used, all processes in one order, so that all connections are made."""
    for group in itertools.islice(groups.values(), 1):
        own, scratch = group.seating.own, torch.zeros(ALIGNMENT, dtype=torch.uint8, device=group.device)
        for lane, sender, receiver in _links(streams, group.seating, group.device):
            if own == sender:
                groups[lane].send(scratch, receiver, _TAGS + 1).wait()
            elif own == receiver:
                groups[lane].receive(scratch, sender, _TAGS + 1).wait()
