"""Memory shared by the processes of one host: one copy for all (`SharedMemory`), or a ring of bounded size.

Both work between any numbers of source and sink processes of one machine, Linux only.

`SharedMemory`: each source rank has an arena with a place for everything that it sends. Sinks keep what lies in it
until they commit, so the commit's copy is the only one where the policy's parameters live in the arena themselves
(`adopt`), and the second one otherwise. Costs one more copy of what a source rank sends, which replaces the bank that a
sink would keep; none where parameters live in it.

`SharedMemoryRing`: each source rank has `slots` times the largest bucket, and both sides copy at once. Slots that
fit the processor's last-level cache together are fastest: few, of a few MiB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.module_tensors import ModuleReader, Rename
from rl_refit.schedule import Routing
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.ring import Memory, Ring
from rl_refit.transports.same_host import Handle
from rl_refit.transports.segment import SHARED_MEMORY, Segment

__all__ = ["SharedMemory", "SharedMemoryRing"]


@final
class SharedMemory:
    """One copy for all sink ranks of the host, in an arena that they read.

    Args:
        directory: A file system in memory, with room for what a source rank sends.
        hold: A module of plain CPU tensors, the policy, to `adopt` as soon as the arena is there.
        rename: For `hold`, as for `ModuleSource`.
    """

    name = "shared memory"
    routing: Routing = "multicast"
    bounded = False

    def __init__(
        self, *, directory: str = SHARED_MEMORY, hold: nn.Module | None = None, rename: Rename | None = None
    ) -> None:
        self._memory = _HostMemory(directory)
        self._ring = Ring(self._memory, directory=directory, stays=True)
        self._hold = hold
        self._rename = rename
        self._adopted_bytes = 0

    @property
    def extra_bytes(self) -> int:
        """Bytes of this process's arena that are not its module's own parameters; 0 where it is no source."""
        return self._ring.nbytes - self._adopted_bytes

    def open(self, channel: Channel, watch: Watch) -> None:
        """Allocate the arena, introduce the processes to each other, and move `hold` into the arena.

        Raises:
            RefitError: There is no room for the arena, a peer is on another host or does not answer, or `hold` cannot
                be moved.
        """
        self._adopted_bytes = 0
        self._ring.open(channel, watch)
        if self._hold is not None and channel.source_rank is not None:
            self.adopt(self._hold, rename=self._rename)

    def adopt(self, module: nn.Module, *, rename: Rename | None = None) -> int:
        """Move the memory of `module`'s tensors into the arena, values and all; return the bytes moved.

        Afterwards a refit copies nothing on this side. Parameters stay the same objects, so optimizers and ties hold;
        addresses change, so adopt before capturing graphs. What this rank does not send stays where it is. The arena
        lives as long as a parameter in it, also after `close`.

        Works for plain, contiguous CPU tensors. Refuses by name, before it moves any, what it cannot move: DTensors
        (FSDP2, tensor parallelism), tensors that share memory without being tied, and those of which this rank sends
        but a part.

        Raises:
            RefitError: The transport is not open, or a tensor cannot be moved; the message lists all.
        """
        places, segment = self._ring.own_places(), self._memory.made
        if segment is None or not places:
            raise RefitError("this process has no arena: it is no source, or the transport is not open")
        moves = _moves(module, rename, places)
        with torch.no_grad():
            for place, tensors in moves:
                place.copy_(tensors[0])
                home = segment.with_own_storage(place)
                for tensor in tensors:
                    tensor.data = home
        self._adopted_bytes = sum(place.nbytes for place, _ in moves)
        return self._adopted_bytes

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Copy into the arena what does not live there, and tell the sinks.

        Raises:
            RefitError: A peer is gone or silent, or out of step.
        """
        self._ring.transfer(outbox, inbox, watch)

    def finish(self) -> None:
        """The arena is written again by the next transfer, which begins when all parties are in it."""

    def close(self) -> None:
        """Free everything, except what parameters live in."""
        self._ring.close()
        self._memory.made = None
        self._adopted_bytes = 0


@final
class SharedMemoryRing:
    """A ring of slots that the source fills while the sinks empty it.

    Args:
        directory: A file system in memory.
    """

    name = "shared memory ring"
    routing: Routing = "unicast"
    bounded = True

    def __init__(self, *, directory: str = SHARED_MEMORY) -> None:
        self._ring = Ring(_HostMemory(directory), directory=directory, stays=False)

    @property
    def extra_bytes(self) -> int:
        """Bytes of this process's ring; 0 where it is no source, since it only maps the rings of others."""
        return self._ring.nbytes

    def open(self, channel: Channel, watch: Watch) -> None:
        """Allocate the ring and introduce the processes to each other.

        Raises:
            RefitError: There is no room for the ring, or a peer is on another host or does not answer.
        """
        self._ring.open(channel, watch)

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams through the rings.

        Raises:
            RefitError: A peer is gone or silent, or out of step.
        """
        self._ring.transfer(outbox, inbox, watch)

    def finish(self) -> None:
        """No sink keeps a slot."""

    def close(self) -> None:
        """Free everything."""
        self._ring.close()


class _HostMemory:
    """Segments, as a `MemoryKind`."""

    def __init__(self, directory: str) -> None:
        self.made: Segment | None = None
        self._directory = directory

    def create(self, nbytes: int, num_sinks: int, channel: Channel) -> tuple[Memory, list[Handle]]:
        segment, descriptor = Segment.create(self._directory, nbytes)
        self.made = segment
        if not num_sinks:
            os.close(descriptor)
        return segment, [Handle({"nbytes": nbytes}, (descriptor,))] * num_sinks

    def attach(self, handle: Handle, nbytes: int, channel: Channel) -> Memory:
        if handle.description["nbytes"] != nbytes or len(handle.descriptors) != 1:
            raise RefitError(
                f"the source's memory has {handle.description['nbytes']:,} bytes, and here the schedule needs "
                f"{nbytes:,}: both sides need the same bucket_bytes and slots",
                phase="prepare",
            )
        return Segment(handle.descriptors[0], nbytes)


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
