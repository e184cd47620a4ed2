"""Slots in memory that processes share: a source rank fills one while its sink ranks read those before it.

Each source rank has one ring of slots, allocated by `open`, which its streams use one after the other, bucket after
bucket. A slot is written again when every sink rank that reads it has said so. All sink ranks of a stream read the same
slot, so nothing is relayed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol, final

from torch import Tensor

from rl_refit.buckets import ALIGNMENT, size_of
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.schedule import Stream
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch, slot_view
from rl_refit.transports.same_host import Handle, Pair, meet, pairs_of, require_one_host
from rl_refit.transports.tokens import Kind, Link, Token

__all__ = ["Memory", "MemoryKind", "Ring"]


class Memory(Protocol):
    """A source rank's memory, as one process sees it."""

    @property
    def bytes(self) -> Tensor:
        """uint8 [nbytes]."""

    def fence(self) -> None:
        """Wait until all copies to and from this memory that this thread began are over."""


class MemoryKind(Protocol):
    """How memory is made, and reached from other processes."""

    def create(self, nbytes: int, num_sinks: int, channel: Channel) -> tuple[Memory, list[Handle]]:
        """New memory, and for each sink rank in another process a handle, whose descriptors the caller closes."""

    def attach(self, handle: Handle, nbytes: int, channel: Channel) -> Memory:
        """The memory of another process; the caller closes the handle's descriptors."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A bucket of a stream and its slot."""

    nbytes: int
    slot: int
    pieces: tuple[tuple[Region, Tensor], ...]
    """Each piece, as a tensor of its dtype and shape in the slot."""


@dataclass(frozen=True)
class _Opened:
    """What `open` made."""

    channel: Channel
    memories: dict[int, Memory]
    """Of each source rank that this process serves or reads."""

    places: dict[tuple[int, int], _Place]
    """By stream and bucket."""

    links: dict[Pair, Link]


@final
class Ring:
    """The rings of all source ranks, as one process takes part in them.

    Args:
        kind: Of memory.
        directory: Where the sockets are while processes meet.
        stays: Whether no slot is written twice in a transfer, so that sinks may keep what lies in them.
    """

    def __init__(self, kind: MemoryKind, *, directory: str, stays: bool) -> None:
        self._kind = kind
        self._directory = directory
        self._stays = stays
        self._opened: _Opened | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of this process's own ring: other processes' rings are theirs."""
        opened = self._opened
        memory = None if opened is None else opened.memories.get(_own(opened.channel))
        return 0 if memory is None else memory.bytes.numel()

    def open(self, channel: Channel, watch: Watch) -> None:
        """Allocate this process's ring, and map those that it reads.

        Raises:
            RefitError: There is no room for it, a peer is on another host or does not answer.
        """
        self.close()
        require_one_host(channel, watch)
        rings, own = _measure(channel), _own(channel)
        served = [j for i, j in pairs_of(channel) if i == own]
        memories: dict[int, Memory] = {}
        handles: list[Handle] = []
        if own in rings:
            memories[own], handles = self._kind.create(rings[own].nbytes, len(served), channel)
        try:
            links, received = meet(channel, dict(zip(served, handles, strict=True)), watch, directory=self._directory)
        finally:
            _close_descriptors(handles)
        try:
            for rank, handle in received.items():
                memories[rank] = self._kind.attach(handle, rings[rank].nbytes, channel)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            _close_descriptors(received.values())
        self._opened = _Opened(channel, memories, dict(_places(channel, memories, rings)), links)

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams.

        Raises:
            RefitError: A peer is gone or silent, tokens do not come in order, or the source breaks its promise.
        """
        if self._opened is None:
            raise RefitError("this transport is closed; open it before a transfer", phase=watch.phase_name)
        _Transfer(self._opened, outbox, inbox, watch, self._stays).run()

    def own_places(self) -> dict[Region, Tensor]:
        """Each box that this process sends, as a tensor in its own ring; the last ones, where slots are used again."""
        opened = self._opened
        if opened is None:
            return {}
        own = {stream.number for stream in opened.channel.schedule.of_source(_own(opened.channel))}
        places = (place for (stream, _), place in opened.places.items() if stream in own)
        return {region: tensor for place in places for region, tensor in place.pieces}

    def close(self) -> None:
        """Close the links, and let go of the memory."""
        if self._opened is not None:
            for link in self._opened.links.values():
                link.close()
        self._opened = None


@dataclass(frozen=True)
class _Transfer:
    """One transfer."""

    opened: _Opened
    outbox: Outbox | None
    inbox: Inbox | None
    watch: Watch
    stays: bool
    unread: dict[int, tuple[Token, tuple[Link, ...]]] = field(default_factory=dict)
    """Of this process's own ring, by slot: the bucket in it, and who has not said yet that it is read."""

    def run(self) -> None:
        channel = self.opened.channel
        for stream in channel.schedule.streams:
            if stream.source_rank == channel.source_rank and self.outbox is not None:
                self._send(stream, self.outbox)
            elif channel.sink_rank in stream.sink_ranks and self.inbox is not None:
                self._receive(stream, channel.sink_rank, self.inbox)
        for slot in tuple(self.unread):
            self._await_readers(slot)

    def _send(self, stream: Stream, outbox: Outbox) -> None:
        opened, own = self.opened, stream.source_rank
        links = tuple(opened.links[own, j] for j in stream.sink_ranks if (own, j) in opened.links)
        inbox = self.inbox if opened.channel.sink_rank in stream.sink_ranks else None
        for number, pieces in itertools.groupby(outbox.pieces(stream), key=itemgetter(0)):
            place = opened.places[stream.number, number]
            self.watch.at(bucket=number)
            self.watch.check()
            self._await_readers(place.slot)
            for (_, target), (_, _, tensor) in zip(place.pieces, pieces, strict=True):
                _copy(target, tensor)
            opened.memories[own].fence()
            token = Token(Kind.FULL, outbox.refit, stream.number, number, place.nbytes)
            for link in links:
                link.send(token, self.watch)
            self.unread[place.slot] = token._replace(kind=Kind.EMPTY), links
            if inbox is not None:
                self._deliver(place, opened.memories[own], inbox)

    def _receive(self, stream: Stream, sink_rank: int, inbox: Inbox) -> None:
        link = self.opened.links[stream.source_rank, sink_rank]
        memory = self.opened.memories[stream.source_rank]
        for number in range(len(stream.buckets)):
            place = self.opened.places[stream.number, number]
            self.watch.at(bucket=number, peer=link.peer)
            self.watch.check()
            token = Token(Kind.FULL, inbox.refit, stream.number, number, place.nbytes)
            link.expect(token, self.watch)
            self._deliver(place, memory, inbox)
            link.send(token._replace(kind=Kind.EMPTY), self.watch)

    def _deliver(self, place: _Place, memory: Memory, inbox: Inbox) -> None:
        for region, tensor in place.pieces:
            inbox.put(region, tensor, stays=self.stays)
        memory.fence()

    def _await_readers(self, slot: int) -> None:
        """Wait until what is in `slot` is read by all for whom it was."""
        if slot in self.unread:
            token, links = self.unread.pop(slot)
            for link in links:
                link.expect(token, self.watch)


def _copy(target: Tensor, tensor: Tensor) -> None:
    """Copy, unless `tensor` is `target`: a parameter that lives in the memory."""
    if target.data_ptr() != tensor.data_ptr() or target.stride() != tensor.stride():
        target.copy_(tensor)


def _close_descriptors(handles: Iterable[Handle]) -> None:
    for descriptor in {descriptor for handle in handles for descriptor in handle.descriptors}:
        os.close(descriptor)


def _own(channel: Channel) -> int:
    """This process's rank of the source; -1, which no rank is, where it has none."""
    return -1 if channel.source_rank is None else channel.source_rank


@dataclass(frozen=True, slots=True)
class _Size:
    """Of one source rank's ring."""

    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes


def _measure(channel: Channel) -> dict[int, _Size]:
    """For each source rank that sends anything its ring: no larger slots, and no more of them, than it has buckets."""
    buckets: dict[int, list[int]] = {}
    for stream in channel.schedule.streams:
        buckets.setdefault(stream.source_rank, []).extend(map(size_of, stream.buckets))
    return {
        rank: _Size(min(channel.slots, len(sizes)), -(-max(sizes) // ALIGNMENT) * ALIGNMENT)
        for rank, sizes in buckets.items()
    }


def _places(
    channel: Channel, memories: dict[int, Memory], rings: dict[int, _Size]
) -> Iterator[tuple[tuple[int, int], _Place]]:
    """The buckets of the rings at hand. Those of a source rank take its slots in turn, through all its streams."""
    dtypes = channel.schedule.dtypes
    turns = dict.fromkeys(rings, 0)
    for stream in channel.schedule.streams:
        rank = stream.source_rank
        for number, bucket in enumerate(stream.buckets):
            slot = turns[rank] % rings[rank].slots
            turns[rank] += 1
            if rank in memories:
                inside = memories[rank].bytes.narrow(0, slot * rings[rank].slot_bytes, rings[rank].slot_bytes)
                pieces = ((p.region, slot_view(inside, p, dtypes[p.region.name])) for p in bucket)
                yield (stream.number, number), _Place(size_of(bucket), slot, tuple(pieces))
