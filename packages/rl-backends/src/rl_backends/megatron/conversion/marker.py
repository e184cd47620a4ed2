"""The marker of a complete conversion, `conversion.json`: what model it is of, and what every other file must be.

It is written last, and its folder gets its name after it. It holds a digest of its own text. Imports no Megatron.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rl_backends.errors import CheckpointError
from rl_backends.megatron.conversion.digests import sampled_digest

__all__ = [
    "FORMAT_VERSION",
    "MARKER",
    "FileRecord",
    "Marker",
    "check_files",
    "is_conversion",
    "read_marker",
    "records",
    "write_marker",
]

MARKER = "conversion.json"
FORMAT, FORMAT_VERSION = "rl-backends conversion", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be the one that was written."""

    name: str
    """Its path within the conversion."""
    num_bytes: int
    sampled_sha256: str
    """See `sampled_digest`; of a file of up to 2 MiB, of all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What a conversion is, without its numbers."""

    model_name: str
    """An id of the Hub, or a folder."""
    revision: str | None
    """The Hub's commit; None for a folder."""
    content: str
    """Key of the files that it was made of."""
    architecture: str
    """Class of transformers."""
    vocabulary_size: int
    """Without what layouts pad it with."""
    dtype: str
    """Of its tensors."""
    source_dtype: str
    """Of the tensors in the files it was made of; `float32` where they differed."""
    num_bytes: int
    """Of all files, this one left out."""
    seconds: float
    """How long it took."""
    ranks: int
    """How many processes wrote it."""
    written_at: str
    """When, in UTC."""
    libraries: dict[str, str]
    """Releases of what wrote it."""
    files: tuple[FileRecord, ...]


def is_conversion(folder: Path) -> bool:
    """Whether a folder says of itself that it is one, sound or not."""
    return (folder / MARKER).is_file()


def records(folder: Path) -> tuple[FileRecord, ...]:
    """Every file below a folder as it is now.

    Raises:
        OSError: one cannot be read.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    return tuple(
        FileRecord(
            name=path.relative_to(folder).as_posix(),
            num_bytes=path.stat().st_size,
            sampled_sha256=sampled_digest(path),
        )
        for path in paths
    )


def write_marker(folder: Path, marker: Marker) -> None:
    """Mark a folder as complete, and wait until that is on disk.

    Raises:
        OSError: it cannot be written.
    """
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(marker)}
    with (folder / MARKER).open("x", encoding="utf-8") as file:
        json.dump({**body, "sha256": _digest(body)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_marker(folder: Path) -> Marker:
    """The marker of a complete conversion; its files are not looked at.

    Raises:
        CheckpointError: there is none, or it is damaged, or of another format.
    """
    path = folder / MARKER
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{folder} is no complete conversion: it has no {MARKER}, which is written last"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(body, dict) or body.pop("sha256", None) != _digest(body):
        raise CheckpointError(f"{path} is damaged: its digest is not that of its text")
    if (found := (body.pop("format", None), body.pop("format_version", None))) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path} is of format {found[0]!r} {found[1]}; this release reads {FORMAT_VERSION}")
    try:
        files = tuple(FileRecord(**record) for record in body.pop("files"))
        marker = Marker(files=files, **body)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} lacks what a conversion has: {error}") from error
    if strange := [record.name for record in files if not _is_inside(record.name)]:
        raise CheckpointError(f"{path} names {strange[0]!r}, which does not lie in the conversion")
    return marker


def check_files(folder: Path, marker: Marker) -> None:
    """Compare the files of a conversion with its marker: names, sizes, sampled digests.

    Raises:
        CheckpointError: one is missing, or is another; every one is named, up to three.
    """
    found = {record.name: problem for record in marker.files if (problem := _problem(folder / record.name, record))}
    if found:
        told = "; ".join(f"{name} {problem}" for name, problem in list(found.items())[:3])
        more = f"; and {len(found) - 3} files more" if len(found) > 3 else ""
        raise CheckpointError(f"{folder} is damaged: {told}{more}")


def _problem(path: Path, record: FileRecord) -> str:
    try:
        size = path.stat().st_size
        if size != record.num_bytes:
            return f"has {size} bytes of {record.num_bytes}"
        return "" if sampled_digest(path) == record.sampled_sha256 else "holds other bytes than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"


def _is_inside(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not {"..", "/"} & set(PurePosixPath(name).parts)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
