"""A directory of versions on a disk: what is called how, and when a version counts as whole.

    <directory>/version-7/source-0-of-2.safetensors     what source rank 0 gives
    <directory>/version-7/source-0-of-2.COMPLETE        its marker: written last, and all at once

Nobody reads a file whose marker is not there, or does not say what it should.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from rl_refit.errors import DeadlineError, RefitError
from rl_refit.layout import Region
from rl_refit.transports.base import PATIENCE_S, Watch
from rl_refit.transports.file_writer import FileWriter
from rl_refit.transports.safetensors_file import SafetensorsFile

__all__ = ["Marker", "Part", "VersionDirectory", "key_of"]

_FORMAT = "rl-refit version 1"
_SHORTEST_PAUSE_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor in a file."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str
    """`digest_tensor` of it."""

    @property
    def region(self) -> Region:
        """The box."""
        return Region(self.name, self.offsets, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What a source says of its file once that is whole."""

    version: int
    run: str
    """Of whom: equal for all files that belong together; empty outside of a `Refit`."""

    refit: int
    """Which refit of that run; 0 outside of a `Refit`."""

    source: int
    """The rank that wrote it."""

    sources: tuple[int, ...]
    """All ranks that write a file of this version."""

    manifest_hash: str
    nbytes: int
    """Of the file."""

    parts: Mapping[str, Part]
    """What is in the file, by the name that it has there."""

    base: str = ""
    """What the file is a delta against; empty where it is none."""

    manifest: str = ""
    """The source's manifest as JSON, in the marker of the first of `sources`."""

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Marker:
        """What `to_json` wrote.

        Raises:
            ValueError: The text is something else.
        """
        try:
            plain = json.loads(text)
            if plain.pop("format") != _FORMAT:
                raise ValueError(f"expected {_FORMAT!r}: another release of rl-refit wrote it")
            parts = {
                key: Part(**{**part, "offsets": tuple(part["offsets"]), "shape": tuple(part["shape"])})
                for key, part in plain.pop("parts").items()
            }
            return cls(**{**plain, "parts": parts, "sources": tuple(plain["sources"])})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


@final
class VersionDirectory:
    """The versions under `root`, of a source of `num_sources` ranks."""

    def __init__(self, root: Path, *, num_sources: int) -> None:
        self.root = root
        self._num_sources = num_sources

    def path(self, version: int) -> Path:
        """The directory of a version."""
        return self.root / f"version-{version}"

    def data_path(self, version: int, source: int) -> Path:
        """The file of one source."""
        return self.path(version) / f"source-{source}-of-{self._num_sources}.safetensors"

    def marker_path(self, version: int, source: int) -> Path:
        """Its marker."""
        return self.data_path(version, source).with_suffix(".COMPLETE")

    def write_marker(self, marker: Marker, watch: Watch) -> None:
        """Say that a file is whole. Every byte of it must be on the disk already."""
        with FileWriter(self.marker_path(marker.version, marker.source), watch) as file:
            file.write(marker.to_json().encode())
            file.publish()

    def read_marker(self, version: int, source: int) -> Marker | None:
        """The marker, or None where there is none.

        Raises:
            RefitError: It is no marker, or that of another version or source.
        """
        path = self.marker_path(version, source)
        try:
            marker = Marker.from_json(path.read_text())
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as error:
            raise RefitError(f"{path}: no marker: {error}", peer=f"source {source}") from error
        if (marker.version, marker.source) != (version, source):
            raise RefitError(
                f"{path}: it is the marker of version {marker.version} of source {marker.source}: it was copied here",
                peer=f"source {source}",
            )
        return marker

    def wait_for(self, version: int, source: int, *, run: str, refit: int, watch: Watch) -> Marker:
        """The marker that source rank `source` writes in this refit; those of earlier ones are passed over.

        Raises:
            DeadlineError: It does not come; says what was there instead.
            RefitError: As for `read_marker`.
        """
        peer, found, pause_s = f"source {source}", "nothing", _SHORTEST_PAUSE_S
        while True:
            marker = self.read_marker(version, source)
            if marker is not None and (marker.run, marker.refit) == (run, refit):
                return marker
            if marker is not None:
                found = f"a marker of refit {marker.refit} of " + ("this run" if marker.run == run else "another run")
            watch.at(peer=peer)
            try:
                watch.check()
            except DeadlineError as error:
                raise DeadlineError(
                    f"{error}; {self.marker_path(version, source)}: {found}",
                    phase=error.phase,
                    peer=peer,
                    seconds=error.seconds,
                ) from error
            time.sleep(min(pause_s, PATIENCE_S))
            pause_s *= 2

    def open_data(self, marker: Marker) -> SafetensorsFile:
        """The file that `marker` is about.

        Raises:
            RefitError: It is missing, or not the one.
        """
        path, peer = self.data_path(marker.version, marker.source), f"source {marker.source}"
        try:
            nbytes = path.stat().st_size
            if nbytes != marker.nbytes:
                raise RefitError(
                    f"{path}: partial or foreign: {nbytes:,} bytes, its marker says {marker.nbytes:,}", peer=peer
                )
            file = SafetensorsFile(path)
        except OSError as error:
            raise RefitError(
                f"{path}: complete, says its marker, and cannot be read: {error.strerror}", peer=peer
            ) from error
        expected = {"version": str(marker.version), "manifest": marker.manifest_hash, "rank": str(marker.source)}
        for key, value in expected.items():
            if file.metadata.get(key) != value:
                raise RefitError(f"{path}: foreign: its {key} is {file.metadata.get(key)!r}, not {value!r}", peer=peer)
        return file

    def forget_marker(self, version: int, source: int) -> None:
        """Take back that the file of a source is whole."""
        self.marker_path(version, source).unlink(missing_ok=True)

    def forget(self, version: int, source: int) -> None:
        """Delete the file of a source: its marker first, and the version's directory with its last file."""
        self.forget_marker(version, source)
        self.data_path(version, source).unlink(missing_ok=True)
        try:
            self.path(version).rmdir()
        except OSError:  # other ranks' files are there still, or it is gone
            return


def key_of(region: Region, shape: tuple[int, ...]) -> str:
    """What a box is called in a file: the tensor's name, and `[first:last, …]` where it is not all of its `shape`."""
    if region.shape == shape:
        return region.name
    spans = (f"{start}:{start + size}" for start, size in zip(region.offsets, region.shape, strict=True))
    return f"{region.name}[{','.join(spans)}]"
