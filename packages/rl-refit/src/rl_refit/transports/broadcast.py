"""Each source rank broadcasts its own boxes to all sink ranks, over torch.distributed's broadcast.

Source ranks take turns, in the order of the schedule, each in a group of its own with the sinks: nobody gathers, and no
source rank receives what is not for it. Every sink receives everything that any sink needs, and keeps its part, so this
is for sinks that all need most of it: replicas of an engine. Sinks that need different parts receive less by
`PointToPoint`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from rl_refit.transports.seating import Seating
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

__all__ = ["Broadcast"]

_UnderWay = tuple[Tensor, Stream, Numbers, Message]
"""Of a broadcast: its slot, its stream, its numbers, and the message."""


@final
class Broadcast:
    """Broadcasts over process groups of the refit's own: gloo for CPU tensors, NCCL for CUDA. A `Transport`.

    Args:
        group: A process group that has all parties in it, to be used instead of groups of its own; other source ranks
            then receive each broadcast too, and drop it. Nothing else may use it during a refit, and a refit that fails
            breaks it.
        host: Where gloo listens: a name or an address of this machine, other machines give theirs. Loopback where
            neither is given.
        interface: The same as a network interface, such as "eth0".

    Raises:
        ValueError: Both `host` and `interface` are given.
    """

    routing: Routing = "multicast"
    bounded = True

    def __init__(
        self, *, group: ProcessGroup | None = None, host: str | None = None, interface: str | None = None
    ) -> None:
        self.name = "broadcast"
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
        self.name = f"broadcast over {backend_for(channel.device)}"
        streams = channel.schedule.streams
        self._session = session = connect(
            channel,
            watch,
            group=self._group,
            address=self._address,
            members=partial(_members, streams),
            greet=partial(_greet, streams),
        )
        seating = session.seating
        if (
            self._group is not None
            and seating is not None
            and self._group.size() > len(set(seating.processes.values()))
        ):
            raise RefitError(
                f"every rank of a group takes part in a broadcast: the group given has {self._group.size()}, and the "
                f"refit {len(set(seating.processes.values()))} processes",
                phase="prepare",
            )
        self._local = tuple(s for s in streams if seating is not None and _processes(s, seating) == {seating.own})
        self._shared = tuple(s for s in streams if s not in self._local and _name(s) in session.groups)
        buckets = [size_of(bucket) for stream in self._shared for bucket in stream.buckets]
        session.slots.append(slots_of(max(buckets, default=0), min(channel.slots, len(buckets)), channel.device))

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Take part in every broadcast of this process's groups, in the order of the schedule.

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
            tasks.append(mine.run(self._local, self._shared))
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
    under_way: deque[_UnderWay] = field(default_factory=deque)

    def run(self, local: tuple[Stream, ...], shared: tuple[Stream, ...]) -> Task:
        """Copy what nobody else needs, and take part in all broadcasts."""
        for stream in local:
            self._copy(stream)
        free = deque(self.session.slots[0])
        for stream in shared:
            root = self.outbox if self.session.channel.source_rank == stream.source_rank else None
            packed = itertools.repeat(()) if root is None else _packed(root, stream)
            for (number, bucket), pieces in zip(enumerate(stream.buckets), packed, strict=False):
                if not free:
                    free.append((yield from self._end_one()))
                self.watch.check()
                self.watch.at(bucket=number)
                slot, numbers = free.popleft(), (self._refit, stream.number, number, size_of(bucket))
                for piece, tensor in pieces:
                    slot_view(slot[HEADER_BYTES:], piece, tensor.dtype).copy_(tensor)
                if root is not None:
                    write_header(slot, numbers)
                    self.session.traffic.sent += payload_of(bucket)
                self.under_way.append((slot, stream, numbers, self._begin(stream, slot, numbers)))
        while self.under_way:
            yield from self._end_one()

    @property
    def _refit(self) -> int:
        boxes = [box for box in (self.outbox, self.inbox) if box is not None]
        return boxes[0].refit

    def _begin(self, stream: Stream, slot: Tensor, numbers: Numbers) -> Message:
        group, process = self.session.groups[_name(stream)], self.seating.process_of("source", stream.source_rank)
        broadcast = partial(group.broadcast, slot[: HEADER_BYTES + numbers[3]], process)
        peer = f"source {stream.source_rank}"
        if process == self.seating.own:
            own = self.session.channel.sink_rank
            peer = ", ".join(f"sink {rank}" for rank in stream.sink_ranks if rank != own)
        return self.session.wire.begin(
            broadcast, group=group, line="broadcast", numbers=numbers, peer=peer, shared=True
        )

    def _end_one(self) -> Generator[Message, None, Tensor]:
        """Wait for the oldest broadcast, keep this process's part of it, and return its slot."""
        slot, stream, numbers, message = self.under_way.popleft()
        yield from self.session.wire.until(message, self.watch)
        self.watch.check()
        self.watch.at(bucket=message.bucket, peer=message.peer)
        received = self.session.channel.source_rank != stream.source_rank
        bucket = stream.buckets[message.bucket]
        if received:
            check_header(slot, numbers, message.peer)
            self.session.traffic.count_received(bucket)
        if self.inbox is not None:
            self.inbox.deliver(bucket, slot[HEADER_BYTES:])
            self.session.traffic.copied += 0 if received else payload_of(bucket)
        return slot

    def _copy(self, stream: Stream) -> None:
        """From this process's source to its own sink, which nobody else shares."""
        assert self.outbox is not None
        assert self.inbox is not None
        for number, piece, tensor in self.outbox.pieces(stream):
            self.watch.check()
            self.watch.at(bucket=number)
            self.inbox.put(piece.region, tensor, stays=self.outbox.stays)
            self.session.traffic.copied += piece.nbytes


def _packed(outbox: Outbox, stream: Stream) -> Iterator[Iterable[tuple[Piece, Tensor]]]:
    """For each bucket of `stream` its pieces."""
    for _, pieces in itertools.groupby(outbox.pieces(stream), key=itemgetter(0)):
        yield ((piece, tensor) for _, piece, tensor in pieces)


def _name(stream: Stream) -> str:
    return f"from source {stream.source_rank}"


def _processes(stream: Stream, seating: Seating) -> set[int]:
    sinks = {seating.process_of("sink", rank) for rank in stream.sink_ranks}
    return {seating.process_of("source", stream.source_rank), *sinks}


def _members(streams: tuple[Stream, ...], seating: Seating) -> dict[str, tuple[int, ...]]:
    groups = {_name(stream): tuple(sorted(_processes(stream, seating))) for stream in streams}
    return {name: processes for name, processes in groups.items() if len(processes) > 1}


def _greet(streams: tuple[Stream, ...], groups: Mapping[str, Group]) -> None:
    """Broadcast a few bytes over each group, in one order, so that all connections are made."""
    for stream in streams:
        if (group := groups.get(_name(stream))) is not None:
            scratch = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=group.device)
            group.broadcast(scratch, group.seating.process_of("source", stream.source_rank)).wait()
