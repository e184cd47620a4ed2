"""The file of one source rank that holds deltas: for every box one, as bytes, under the name that the box has.

Knows the directory of versions and the codec; what the deltas are against, the caller says.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import uint8

from rl_refit.delta.base_copy import BaseCopy
from rl_refit.delta.codec import encode, inspect
from rl_refit.errors import RefitError
from rl_refit.schedule import Stream
from rl_refit.transports.base import Outbox, Watch
from rl_refit.transports.file_writer import FileWriter, require_space
from rl_refit.transports.safetensors_file import Entry, SafetensorsFile, write_header
from rl_refit.transports.version_directory import Marker, Part, VersionDirectory
from rl_refit.transports.version_file import Origin, keys_of, make_room, metadata_of

__all__ = ["open_delta_file", "write_delta_file"]

_LARGEST = 10**15  # bytes of a file, for the room that its header needs


def write_delta_file(
    directory: VersionDirectory,
    outbox: Outbox,
    stream: Stream,
    *,
    origin: Origin,
    copy: BaseCopy,
    base: str,
    watch: Watch,
) -> Marker:
    """Write what leads from `copy`, which holds `base`, to the source's tensors, then the marker. `copy` stays.

    Raises:
        RefitError: There is no room, or the disk fails; no part of the file is left.
    """
    schedule, keys = outbox.schedule, keys_of(stream, outbox.schedule)
    metadata = {**metadata_of(origin, schedule), "base": base}
    room = len(write_header({key: Entry(uint8, (_LARGEST,), _LARGEST) for key in keys.values()}, metadata))
    make_room(directory, origin, room)
    path = directory.data_path(origin.version, origin.source)
    entries: dict[str, Entry] = {}
    parts: dict[str, Part] = {}
    end = 0
    with FileWriter(path, watch) as file:
        file.seek(room)
        for _, piece, tensor in outbox.pieces(stream):
            region, key = piece.region, keys[piece.region]
            delta = encode(copy.tensors[key], tensor.to(copy.tensors[key].device), base_digest=copy.digests[key])
            digest = inspect(delta).result_digest
            require_space(path.parent, delta.numel())
            file.write(delta)
            entries[key] = Entry(uint8, (delta.numel(),), end)
            end = entries[key].end
            parts[key] = Part(name=region.name, offsets=region.offsets, shape=region.shape, digest=digest)
        file.seek(0)
        file.write(write_header(entries, metadata, length=room))
        file.publish()
    marker = origin.marker(schedule, nbytes=room + end, parts=parts, base=base)
    directory.write_marker(marker, watch)
    return marker


def open_delta_file(directory: VersionDirectory, marker: Marker, keys: Iterable[str]) -> SafetensorsFile:
    """The file of `marker`, which holds a delta for each of `keys` and nothing else.

    Raises:
        RefitError: It is missing, partial or foreign; says which, and in what it differs.
    """
    path, expected = directory.data_path(marker.version, marker.source), set(keys)
    file = directory.open_data(marker)
    differing = sorted(expected ^ set(file.entries))
    differing += [key for key, entry in file.entries.items() if entry.dtype != uint8]
    if differing or file.metadata.get("base") != marker.base:
        raise RefitError(
            f"{path}: foreign: it does not hold the deltas of this plan against {marker.base}, but differs in "
            f"{', '.join(differing) or 'its base'}",
            peer=f"source {marker.source}",
        )
    return file
