"""The file of one source rank in a version: written whole with its marker, and held to the schedule when it is read.

Knows the directory and the format; decides nothing about when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rl_refit.digest import digest_tensor
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.schedule import Schedule, Stream
from rl_refit.transports.base import Outbox, Watch
from rl_refit.transports.file_writer import FileWriter, require_space
from rl_refit.transports.safetensors_file import SafetensorsFile, lay_out, write_header
from rl_refit.transports.version_directory import Marker, Part, VersionDirectory, key_of

__all__ = ["Origin", "keys_of", "make_room", "metadata_of", "open_whole_file", "write_whole_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which file of which refit it is."""

    version: int
    run: str
    refit: int
    source: int

    def marker(self, schedule: Schedule, *, nbytes: int, parts: dict[str, Part], base: str = "") -> Marker:
        """The marker of the file, once it is written."""
        sources = tuple(sorted({stream.source_rank for stream in schedule.streams}))
        manifest = schedule.plan.source
        return Marker(
            **dataclasses.asdict(self),
            sources=sources,
            manifest_hash=manifest.hash(),
            nbytes=nbytes,
            parts=parts,
            base=base,
            manifest=manifest.to_json() if self.source == sources[0] else "",
        )


def keys_of(stream: Stream, schedule: Schedule) -> dict[Region, str]:
    """What each box of a stream is called in its file."""
    shapes = schedule.plan.source.by_name
    return {
        piece.region: key_of(piece.region, shapes[piece.region.name].shape)
        for bucket in stream.buckets
        for piece in bucket
    }


def metadata_of(origin: Origin, schedule: Schedule) -> dict[str, str]:
    """What the header of a file says of it."""
    return {
        "format": "pt",
        "version": str(origin.version),
        "manifest": schedule.plan.source.hash(),
        "rank": str(origin.source),
        "run": origin.run,
        "refit": str(origin.refit),
    }


def write_whole_file(
    directory: VersionDirectory,
    outbox: Outbox,
    stream: Stream,
    *,
    origin: Origin,
    watch: Watch,
    seen: Callable[[str, Tensor, str], None] = lambda _key, _tensor, _digest: None,
) -> Marker:
    """Write all boxes of `stream`, then the marker.

    Args:
        directory: Where to.
        outbox: Where from.
        stream: Of this source rank.
        origin: Which file it is.
        watch: Looked at between chunks.
        seen: Called with the name, the values and the digest of every box when it was written.

    Raises:
        RefitError: There is no room, or the disk fails; no part of the file is left.
    """
    schedule, keys = outbox.schedule, keys_of(stream, outbox.schedule)
    entries = lay_out((key, schedule.dtypes[region.name], region.shape) for region, key in keys.items())
    header = write_header(entries, metadata_of(origin, schedule))
    path = directory.data_path(origin.version, origin.source)
    nbytes = len(header) + sum(entry.nbytes for entry in entries.values())
    make_room(directory, origin, nbytes)
    parts: dict[str, Part] = {}
    with FileWriter(path, watch) as file:
        file.write(header)
        for _, piece, tensor in outbox.pieces(stream):
            region, key = piece.region, keys[piece.region]
            file.seek(len(header) + entries[key].start)
            file.write(tensor)
            digest = digest_tensor(tensor)
            parts[key] = Part(name=region.name, offsets=region.offsets, shape=region.shape, digest=digest)
            seen(key, tensor, digest)
        file.publish()
    marker = origin.marker(schedule, nbytes=nbytes, parts=parts)
    directory.write_marker(marker, watch)
    return marker


def make_room(directory: VersionDirectory, origin: Origin, nbytes: int) -> None:
    """Make the version's directory, take back what an earlier attempt said of this file, and check the disk."""
    path = directory.path(origin.version)
    try:
        path.mkdir(parents=True, exist_ok=True)
        directory.forget_marker(origin.version, origin.source)
    except OSError as error:
        raise RefitError(f"cannot write in {path}: {error.strerror}") from error
    require_space(path, nbytes)


def open_whole_file(
    directory: VersionDirectory, marker: Marker, stream: Stream, *, schedule: Schedule
) -> SafetensorsFile:
    """The file of `marker`, which holds the boxes of `stream` and nothing else.

    Raises:
        RefitError: It is missing, partial, foreign, or the file of another plan; says which, and in what it differs.
    """
    peer = f"source {marker.source}"
    path = directory.data_path(marker.version, marker.source)
    manifest_hash = schedule.plan.source.hash()
    if marker.manifest_hash != manifest_hash:
        raise RefitError(
            f"{path}: stale: it was written for manifest {marker.manifest_hash[:12]}, and this refit is of "
            f"{manifest_hash[:12]}",
            peer=peer,
        )
    file = directory.open_data(marker)
    keys = keys_of(stream, schedule)
    expected = lay_out((key, schedule.dtypes[region.name], region.shape) for region, key in keys.items())
    for key in {**expected, **file.entries}:
        if file.entries.get(key) != expected.get(key):
            raise RefitError(
                f"{path}: foreign: for {key!r} the plan has {expected.get(key)}, the file {file.entries.get(key)}",
                peer=peer,
            )
    return file
