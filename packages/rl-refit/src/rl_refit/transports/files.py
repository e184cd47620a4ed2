"""Weights through a directory that all parties see: for debugging, for slow links between sites, and for a second look.

A file counts once its marker does, and it is held to the plan, name by name. Each source rank writes what any rank of
the sink needs, once; each rank of the sink maps the files and takes its part, without a copy of its own. Any
safetensors library reads the files.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import final

from rl_refit.buckets import Piece
from rl_refit.errors import PeerError, RefitError
from rl_refit.schedule import Routing, Stream
from rl_refit.stores import Store
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.safetensors_file import SafetensorsFile
from rl_refit.transports.version_directory import VersionDirectory
from rl_refit.transports.version_file import Origin, keys_of, open_whole_file, write_whole_file

__all__ = ["Files", "Versions", "agree_on_run", "store_of", "wanted_pieces"]


@final
class Files:
    """Writes every version to `directory`, and reads it from there. A `Transport`.

    Args:
        directory: Of one run and one refit; the same files at all parties, not necessarily under the same path.
        keep: Versions that stay there, beside the one that is being written. Older ones of this run are deleted when a
            refit is over.

    Raises:
        ValueError: `keep` is not positive.
    """

    name = "files"
    routing: Routing = "multicast"
    bounded = False

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        self._versions = Versions(Path(directory), keep=keep)
        self._mapped: list[SafetensorsFile] = []

    def open(self, channel: Channel, watch: Watch) -> None:
        """Make the directory, and agree on a name for this run, so that files of another one are told apart."""
        self._channel = channel
        self._run = agree_on_run(channel)
        self._wanted = wanted_pieces(channel)
        self._versions.open(channel)

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Write this rank's file, then take what this rank needs from those of the others.

        Raises:
            RefitError: The disk is full or fails, or a file is partial, stale or foreign; names the file.
            DeadlineError: A file does not come; says what was there instead.
        """
        if outbox is not None:
            for stream in self._channel.schedule.of_source(self._rank):
                origin = Origin(version=outbox.version, run=self._run, refit=outbox.refit, source=self._rank)
                write_whole_file(self._versions.directory, outbox, stream, origin=origin, watch=watch)
                self._versions.written(outbox.version)
        if inbox is not None:
            for stream, pieces in self._wanted:
                self._read(stream, pieces, inbox)

    def finish(self) -> None:
        """Let the mappings go, and delete what is too old."""
        self._mapped.clear()
        self._versions.delete_old()

    def close(self) -> None:
        """Let the mappings go; the files stay."""
        self._mapped.clear()

    @property
    def extra_bytes(self) -> int:
        """None: files are mapped, and their pages are the system's."""
        return 0

    @property
    def _rank(self) -> int:
        rank = self._channel.source_rank
        assert rank is not None
        return rank

    def _read(self, stream: Stream, pieces: tuple[Piece, ...], inbox: Inbox) -> None:
        directory, source, watch = self._versions.directory, stream.source_rank, inbox.watch
        marker = directory.wait_for(inbox.version, source, run=self._run, refit=inbox.refit, watch=watch)
        file = open_whole_file(directory, marker, stream, schedule=self._channel.schedule)
        keys = keys_of(stream, self._channel.schedule)
        self._mapped.append(file)
        for piece in pieces:
            file.read_ahead(keys[piece.region])
        for piece in pieces:
            watch.at(bucket=0, tensor=piece.region.name, peer=f"source {source}")
            watch.check()
            tensor = file.tensor(keys[piece.region]).to(self._channel.device)
            inbox.put(piece.region, tensor, stays=True)


@final
class Versions:
    """The versions that this process wrote, of which the newest stay.

    Args:
        root: The directory.
        keep: How many stay.
    """

    directory: VersionDirectory

    def __init__(self, root: Path, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, so that the sinks find the newest version; got keep={keep}")
        self._root, self._keep = root, keep
        self._written: list[int] = []

    def open(self, channel: Channel) -> None:
        """Make the directory.

        Raises:
            RefitError: It cannot be made.
        """
        num_sources = max(channel.schedule.plan.source.ranks, default=0) + 1
        self.directory = VersionDirectory(self._root, num_sources=num_sources)
        self._source_rank = channel.source_rank
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefitError(f"cannot make the directory {self._root}: {error.strerror}") from error

    def written(self, version: int) -> None:
        """Count a version whose file is whole."""
        self._written = [*(other for other in self._written if other != version), version]

    def delete_old(self) -> None:
        """Delete all but the newest, which by now have served; what cannot be deleted is tried again the next time."""
        for version in self._written[: -self._keep]:
            assert self._source_rank is not None
            try:
                self.directory.forget(version, self._source_rank)
            except OSError:  # the refit is over, and was good: a disk that fills up is found by the next one
                continue
            self._written.remove(version)


def store_of(channel: Channel) -> Store:
    """The store that the parties share.

    Raises:
        RefitError: There is none.
    """
    if channel.store is None:
        raise RefitError("files are for parties that meet in a rendezvous; without one, see write_version")
    return channel.store


def agree_on_run(channel: Channel) -> str:
    """A name that all parties of this channel, and nobody else, share."""
    store = store_of(channel)
    try:
        return store.compare_set("run", "", uuid.uuid4().hex).decode()
    except RuntimeError as error:
        raise PeerError(f"the store of the rendezvous is out of reach: {error}") from error


def wanted_pieces(channel: Channel) -> tuple[tuple[Stream, tuple[Piece, ...]], ...]:
    """The streams that this process's rank of the sink needs, and what it needs of each."""
    rank = channel.sink_rank
    if rank is None:
        return ()
    sink = channel.schedule.plan.sink
    boxes = {meta.name: meta.regions().get(rank, ()) for meta in sink.tensors if meta.travels}
    wanted = []
    for stream in channel.schedule.of_sink(rank):
        pieces = (piece for bucket in stream.buckets for piece in bucket)
        mine = tuple(piece for piece in pieces if any(map(piece.region.intersect, boxes[piece.region.name])))
        if mine:
            wanted.append((stream, mine))
    return tuple(wanted)
