"""Only the elements that changed, through a directory that all parties see: for links where bytes are dear.

The first version goes whole; each later one as a delta against the last that every rank of the sink concerned still
has. Both ends keep a copy of that version: in the sink it is the stage, from which a commit copies.

Which version that is, nobody assumes. Before every refit each rank of the sink says what it holds; a source encodes
against the newest version that all of them, and itself, have or can go back to, and writes it whole where there is
none, as for a sink that was restarted. A delta names its base, is refused by who does not hold that, and carries the
digests of every box before and after. So a refit may be aborted anywhere, at some ranks after and at others before they
took the delta: the next one begins by taking it back where needed. Whether a version was ever committed does not
matter: what serves is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from rl_refit.buckets import Piece
from rl_refit.delta.base_copy import BaseCopy
from rl_refit.delta.bases import Bases
from rl_refit.delta.delta_file import open_delta_file, write_delta_file
from rl_refit.schedule import Routing, Stream
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.files import Versions, agree_on_run, store_of, wanted_pieces
from rl_refit.transports.version_directory import Marker
from rl_refit.transports.version_file import Origin, keys_of, open_whole_file, write_whole_file

__all__ = ["DeltaFiles", "DeltaTraffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTraffic:
    """What a source rank wrote for one version."""

    base: str | None
    """What the deltas are against: "version 7 (refit 3)"; None where the version went whole."""

    file_bytes: int
    """Bytes of the file."""

    tensor_bytes: int
    """Bytes of the boxes."""

    changed: int
    """Elements that differ from the base; of a whole version, all."""

    unchanged_segments: int
    sparse_segments: int
    dense_segments: int
    """Segments, of up to 4 MiB, that were written as nothing, as their changed elements, and whole since that is less.
    """


@final
class DeltaFiles:
    """Writes versions to `directory` as deltas, and reads them from there. A `Transport`.

    Costs each end a copy of what it sends or receives; a sink that keeps the memory of the transport, as `ModuleSink`
    does, has no other stage. The source's copy is in the memory of the CPU, wherever its tensors are.

    Args:
        directory: Of one run and one refit; the same files at all parties, not necessarily under the same path.
        keep: Versions that stay there, beside the one that is being written.

    Raises:
        ValueError: `keep` is not positive.
    """

    name = "delta files"
    routing: Routing = "multicast"
    bounded = False

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        self._versions = Versions(Path(directory), keep=keep)
        self._given: BaseCopy | None = None
        self._taken: dict[int, BaseCopy] = {}
        self.traffic: DeltaTraffic | None = None
        """Of the last version that this process's rank of the source wrote."""

    def open(self, channel: Channel, watch: Watch) -> None:
        """Make the directory; both ends begin without a base."""
        self._channel = channel
        self._run = agree_on_run(channel)
        self._bases = Bases(store_of(channel))
        self._wanted = wanted_pieces(channel)
        self._versions.open(channel)
        self._taken = {stream.source_rank: BaseCopy(channel.device) for stream, _ in self._wanted}
        self._given = None if channel.source_rank is None else BaseCopy(torch.device("cpu"))

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Say what this rank holds, write this rank's file, then take what this rank needs from those of the others.

        Raises:
            RefitError: The disk is full or fails, or a file is partial, stale, foreign, or of another base.
            DigestError: A copy, or what arrived, is not what it should be; the next refit sends it whole.
            DeadlineError: A file, or a sink's word, does not come.
        """
        schedule = self._channel.schedule
        if inbox is not None:
            for stream, _ in self._wanted:
                bases = self._taken[stream.source_rank].within_reach
                self._bases.declare(inbox.sink_rank, stream.source_rank, refit=inbox.refit, within_reach=bases)
        if outbox is not None and self._channel.source_rank is not None:
            for stream in schedule.of_source(self._channel.source_rank):
                self._write(stream, outbox, watch)
        if inbox is not None:
            for stream, pieces in self._wanted:
                self._read(stream, pieces, inbox)

    def finish(self) -> None:
        """Delete what is too old. The copies stay, and wait to hear which of their versions the next delta needs."""
        self._versions.delete_old()

    def close(self) -> None:
        """Let the copies go; the files stay."""
        self._given, self._taken = None, {}

    @property
    def extra_bytes(self) -> int:
        """Bytes of the copies."""
        copies = [*self._taken.values(), *([] if self._given is None else [self._given])]
        return sum(copy.nbytes for copy in copies)

    def _write(self, stream: Stream, outbox: Outbox, watch: Watch) -> None:
        copy, source = self._given, stream.source_rank
        assert copy is not None
        origin = Origin(version=outbox.version, run=self._run, refit=outbox.refit, source=source)
        takers = _takers(stream, self._channel)
        base = self._bases.common(copy.within_reach, takers, source_rank=source, refit=outbox.refit, watch=watch)
        if base is None:
            self._write_whole(stream, outbox, origin=origin, copy=copy)
        else:
            self._write_delta(stream, outbox, origin=origin, copy=copy, base=base)
        self._versions.written(outbox.version)

    def _write_whole(self, stream: Stream, outbox: Outbox, *, origin: Origin, copy: BaseCopy) -> None:
        copy.begin_whole()
        marker = write_whole_file(
            self._versions.directory, outbox, stream, origin=origin, watch=outbox.watch, seen=copy.put
        )
        copy.end(_name(marker))
        self.traffic = DeltaTraffic(
            base=None,
            file_bytes=marker.nbytes,
            tensor_bytes=copy.nbytes,
            changed=sum(tensor.numel() for tensor in copy.tensors.values()),
            unchanged_segments=0,
            sparse_segments=0,
            dense_segments=0,
        )

    def _write_delta(self, stream: Stream, outbox: Outbox, *, origin: Origin, copy: BaseCopy, base: str) -> None:
        directory, watch = self._versions.directory, outbox.watch
        copy.go_to(base)
        marker = write_delta_file(directory, outbox, stream, origin=origin, copy=copy, base=base, watch=watch)
        file = open_delta_file(directory, marker, marker.parts)  # while the sinks read it, this end takes it too
        copy.begin()
        infos = [copy.step(key, file.tensor(key)) for key in marker.parts]
        copy.end(_name(marker))
        self.traffic = DeltaTraffic(
            base=base,
            file_bytes=marker.nbytes,
            tensor_bytes=copy.nbytes,
            changed=sum(info.changed for info in infos),
            unchanged_segments=sum(info.count("unchanged") for info in infos),
            sparse_segments=sum(info.count("sparse") for info in infos),
            dense_segments=sum(info.count("dense") for info in infos),
        )

    def _read(self, stream: Stream, pieces: tuple[Piece, ...], inbox: Inbox) -> None:
        directory, source, watch = self._versions.directory, stream.source_rank, inbox.watch
        schedule, copy = self._channel.schedule, self._taken[source]
        marker = directory.wait_for(inbox.version, source, run=self._run, refit=inbox.refit, watch=watch)
        keys = keys_of(stream, schedule)
        if marker.base:
            file = open_delta_file(directory, marker, keys.values())
            copy.go_to(marker.base)
            copy.begin()
        else:
            file = open_whole_file(directory, marker, stream, schedule=schedule)
            copy.begin_whole()
        for piece in pieces:
            watch.at(bucket=0, tensor=piece.region.name, peer=f"source {source}")
            watch.check()
            key = keys[piece.region]
            if marker.base:
                copy.step(key, file.tensor(key))
            else:
                copy.put(key, file.tensor(key), marker.parts[key].digest)
        copy.end(_name(marker))
        for piece in pieces:
            inbox.put(piece.region, copy.tensors[keys[piece.region]], stays=True)


def _name(marker: Marker) -> str:
    return f"version {marker.version} (refit {marker.refit})"


def _takers(stream: Stream, channel: Channel) -> tuple[int, ...]:
    """The sink ranks that need anything of a stream."""
    sink = channel.schedule.plan.sink
    regions = [piece.region for bucket in stream.buckets for piece in bucket]
    boxes = {region.name: sink.by_name[region.name].regions() for region in regions}
    return tuple(
        rank
        for rank in stream.sink_ranks
        if any(region.intersect(box) for region in regions for box in boxes[region.name].get(rank, ()))
    )
