"""Which process each party of a refit is, agreed upon through the store: once, before a process group is made.

A process that is a rank of the source and a rank of the sink is one process, with one number. Ranks that take part in
no stream are left out, and need not be there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from rl_refit.errors import PeerError, RefitError
from rl_refit.schedule import Stream
from rl_refit.transports.base import Channel, Watch

__all__ = ["Hop", "Seating", "hop_of", "take_seats"]

_LONGEST_PAUSE_S = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Everyone who takes part in a stream."""

    processes: Mapping[str, int]
    """Party, such as "sink 1" → the number of its process: source ranks first, or the rank in the user's group."""

    own: int
    """The number of this process."""

    def process_of(self, role: str, rank: int) -> int:
        """The process that is rank `rank` of "source" or "sink"."""
        return self.processes[f"{role} {rank}"]

    def name_of(self, process: int) -> str:
        """All parties that a process is."""
        return " and ".join(party for party, number in self.processes.items() if number == process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """What one process does for one unicast stream: where its buckets come from and go to."""

    origin: tuple[int, str] | None
    """The process that it receives from and the party there; None at the source itself."""

    targets: tuple[tuple[int, str], ...]
    """The processes that it sends to, and the parties there: the sinks, or one of them that relays to the others."""

    delivers_here: bool
    """Whether its own sink rank is among those that need the stream."""


def hop_of(stream: Stream, seating: Seating) -> Hop | None:
    """The part of this process in a unicast stream; None where it has none.

    The first sink rank relays to the others. What the source's own process needs never leaves it; where that is the
    first sink rank, the source sends to the others itself.
    """
    root = seating.process_of("source", stream.source_rank)
    sinks = [(seating.process_of("sink", rank), f"sink {rank}") for rank in stream.sink_ranks]
    away = tuple(sink for sink in sinks if sink[0] != root)
    relays = sinks[0][0] != root
    here = seating.own in (process for process, _ in sinks)
    if seating.own == root:
        return Hop(origin=None, targets=away[:1] if relays else away, delivers_here=here)
    if not here:
        return None
    if relays and seating.own != away[0][0]:
        return Hop(origin=away[0], targets=(), delivers_here=True)
    return Hop(origin=(root, f"source {stream.source_rank}"), targets=away[1:] if relays else (), delivers_here=True)


def take_seats(channel: Channel, watch: Watch, *, group_rank: int | None = None) -> Seating | None:
    """Number the processes, as all of them do; None for one that takes part in no stream.

    Args:
        channel: Who this process is, and the store to agree through.
        watch: Looked at while waiting.
        group_rank: This process's rank in the user's own process group, where there is one.

    Raises:
        RefitError: There are other processes and no store, two of them have one rank, or `watch.check` raises.
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
        return Seating(processes=dict.fromkeys(parties, 0), own=0)
    if channel.store is None:
        raise RefitError(
            f"the streams join {', '.join(parties)}, and this process is {' and '.join(mine)} alone: "
            f"give Refit a rendezvous",
            phase="prepare",
        )
    for party in mine:
        channel.store.set(f"seat of {party}", json.dumps([mine, group_rank]))
    if mine[0] == parties[0]:
        said = {party: _read(channel.store, f"seat of {party}", (party, watch)) for party in parties}
        channel.store.set("seats", json.dumps(_number(said)))
    processes: dict[str, int] = _read(channel.store, "seats", (parties[0], watch))
    return Seating(processes=processes, own=processes[mine[0]])


def _number(said: Mapping[str, Any]) -> dict[str, int]:
    """Party → process, from the parties that each one's process is and its rank in the user's group."""
    firsts = dict.fromkeys(parties[0] for parties, _ in said.values())
    numbers = {first: number for number, first in enumerate(firsts)}
    given = {parties[0]: rank for parties, rank in said.values()}
    ranks = list(given.values())
    if any(rank is None for rank in ranks) != all(rank is None for rank in ranks) or (
        ranks[0] is not None and len(set(ranks)) < len(ranks)
    ):
        raise RefitError(f"each process needs its own rank in one process group, or none any; got {given}")
    return {party: numbers[them[0]] if rank is None else rank for party, (them, rank) in said.items()}


def _read(store: Store, key: str, waiting: tuple[str, Watch]) -> Any:
    """The JSON under `key`, once it is there."""
    peer, watch = waiting
    watch.at(peer=peer)
    pause = 1e-4
    try:
        while not store.check([key]):
            watch.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        value = json.loads(store.get(key))
    except DistError as error:
        raise PeerError(f"the store of the rendezvous is gone: {str(error).splitlines()[0]}", peer=peer) from error
    watch.at()
    return value
