"""Who takes part in a transfer, which medium joins each pair of processes, and what each process does for a stream.

Processes say through the store where they are: the host, the device, and the GPUs that they see. From that table all of
them derive the same media and the same hops.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rl_refit import gpu
from rl_refit.errors import RefitError
from rl_refit.schedule import Stream
from rl_refit.stores import Store
from rl_refit.transports.base import Channel, Watch

__all__ = ["Hop", "Medium", "Peer", "Peers", "Process", "hops_of", "join", "read_key"]

Medium = Literal["shared memory", "CUDA IPC", "gloo", "NCCL"]
"""The first two are memory that a reader maps; over the other two it is sent."""

Peer = tuple[int, str]
"""The number of a process, and the party there that is meant, such as "sink 1"."""

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Where a process is."""

    parties: tuple[str, ...]
    """One or two, such as "source 0"."""

    host: str
    """The boot of its kernel, which the containers of one machine share."""

    device: str
    """Where its tensors are: "cpu" or "cuda"."""

    gpu: str | None
    """UUID of its own GPU."""

    visible: tuple[str, ...]
    """UUIDs of all GPUs that it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Everyone who takes part in a stream."""

    processes: tuple[Process, ...]
    """By number: source ranks first."""

    own: int
    """The number of this process."""

    maps: bool
    """Whether processes of one host may map each other's memory."""

    on_gpus: bool
    """Whether slots are in GPU memory: where all tensors are, and every pair has a medium for it."""

    def number_of(self, party: str) -> int:
        """The process that is `party`."""
        return next(number for number, process in enumerate(self.processes) if party in process.parties)

    def name_of(self, number: int) -> str:
        """All parties that a process is."""
        return " and ".join(self.processes[number].parties)

    def medium(self, owner: int, reader: int) -> Medium:
        """How `reader` gets what is in a slot of `owner`."""
        ours, theirs = self.processes[owner], self.processes[reader]
        together = self.maps and ours.host == theirs.host and sys.platform == "linux"
        if self.on_gpus:
            return "CUDA IPC" if together and ours.gpu in theirs.visible else "NCCL"
        return "shared memory" if together else "gloo"

    def is_mapped(self, owner: int, reader: int) -> bool:
        """Whether `reader` reads the slots of `owner` in place."""
        return self.medium(owner, reader) in ("shared memory", "CUDA IPC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """What one process does for one stream."""

    stream: Stream

    origin: Peer | None = None
    """In whose slot the buckets are; None at the source itself."""

    is_mapped: bool = False
    """Whether they are read there, and not received into a slot of this process."""

    readers: tuple[Peer, ...] = ()
    """Who reads the slots of this process in place."""

    receivers: tuple[Peer, ...] = ()
    """To whom the slots of this process are sent."""

    delivers_here: bool = True
    """Whether a sink rank of this process needs the stream."""


def hops_of(stream: Stream, peers: Peers) -> dict[int, Hop]:
    """What each process does for `stream`.

    Whoever can map the source's memory reads it there. Of the others the first receives, and the rest map that one's
    memory or are sent on by it, so that a bucket enters a host once.
    """
    party = f"source {stream.source_rank}"
    source = peers.number_of(party)
    sinks = [(peers.number_of(f"sink {rank}"), f"sink {rank}") for rank in stream.sink_ranks]
    away = [sink for sink in sinks if sink[0] != source]
    mapped = tuple(sink for sink in away if peers.is_mapped(source, sink[0]))
    rest = [sink for sink in away if sink not in mapped]
    hops = {source: Hop(stream=stream, readers=mapped, receivers=tuple(rest[:1]), delivers_here=len(away) < len(sinks))}
    for number, _ in mapped:
        hops[number] = Hop(stream=stream, origin=(source, party), is_mapped=True)
    if rest:
        first, others = rest[0], rest[1:]
        near = tuple(sink for sink in others if peers.is_mapped(first[0], sink[0]))
        far = tuple(sink for sink in others if sink not in near)
        hops[first[0]] = Hop(stream=stream, origin=(source, party), readers=near, receivers=far)
        for sink in others:
            hops[sink[0]] = Hop(stream=stream, origin=first, is_mapped=sink in near)
    return hops


def join(channel: Channel, watch: Watch, *, maps: bool) -> Peers | None:
    """Number the processes, as all of them do; None for one that takes part in no stream.

    Args:
        channel: Who this process is, and the store to agree through.
        watch: Looked at while waiting.
        maps: Whether processes of one host may map each other's memory; the first process's choice holds.

    Raises:
        RefitError: There are other processes and no store; a device has no medium; or `watch.check` raises.
    """
    streams = channel.schedule.streams
    sources = sorted({stream.source_rank for stream in streams})
    sinks = sorted({rank for stream in streams for rank in stream.sink_ranks})
    parties = (*(f"source {rank}" for rank in sources), *(f"sink {rank}" for rank in sinks))
    me = (f"source {channel.source_rank}", f"sink {channel.sink_rank}")
    mine = tuple(party for party in me if party in parties)
    if not mine:
        return None
    if mine == parties:
        own = Process(parties=mine, host="", device=channel.device.type, gpu=None, visible=())
        return Peers(processes=(own,), own=0, maps=maps, on_gpus=channel.device.type == "cuda")
    if channel.device.type not in DEVICES:
        raise RefitError(f"weights travel between {' and '.join(DEVICES)}; got device={str(channel.device)!r}")
    own = _this_process(mine, channel.device)
    if channel.store is None:
        raise RefitError(
            f"the streams join {', '.join(parties)}, and this process is {' and '.join(mine)} alone: "
            f"give Refit a rendezvous",
            phase="prepare",
        )
    for party in mine:
        channel.store.set(f"process of {party}", json.dumps(asdict(own)))
    if mine[0] == parties[0]:
        said = [read_key(channel.store, f"process of {party}", peer=party, watch=watch) for party in parties]
        table = {tuple(process["parties"]): process for process in said}
        channel.store.set("processes", json.dumps({"maps": maps, "processes": list(table.values())}))
    agreed = read_key(channel.store, "processes", peer=parties[0], watch=watch)
    processes = tuple(
        Process(**{**said, "parties": tuple(said["parties"]), "visible": tuple(said["visible"])})
        for said in agreed["processes"]
    )
    return Peers(
        processes=processes,
        own=next(number for number, process in enumerate(processes) if mine[0] in process.parties),
        maps=agreed["maps"],
        on_gpus=_all_on_gpus(streams, processes, maps=agreed["maps"]),
    )


def _all_on_gpus(streams: Iterable[Stream], processes: tuple[Process, ...], *, maps: bool) -> bool:
    """Whether slots can be in GPU memory: otherwise they are in the host's, and each side copies to or from its device.

    NCCL takes one process a GPU, so a trainer and an engine that share GPUs of several hosts go through the hosts.
    """
    if any(process.device != "cuda" for process in processes):
        return False
    peers = Peers(processes=processes, own=0, maps=maps, on_gpus=True)
    sent = set[int]()
    for stream in streams:
        for number, hop in hops_of(stream, peers).items():
            sent |= {number, *(receiver for receiver, _ in hop.receivers)} if hop.receivers else set()
    return len({processes[number].gpu for number in sent}) == len(sent)


def _this_process(parties: tuple[str, ...], device: torch.device) -> Process:
    own, visible = None, tuple[str, ...]()
    if device.type == "cuda":
        visible = gpu.uuids()
        own = visible[gpu.index_of(device)]
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return Process(parties=parties, host=host, device=device.type, gpu=own, visible=visible)


def read_key(store: Store, key: str, *, peer: str, watch: Watch) -> Any:
    """The JSON under `key`, which `peer` sets, once it is there."""
    watch.at(peer=peer)
    text = watch.until(lambda: store.get(key) if store.check([key]) else None)
    watch.at()
    return json.loads(text)
