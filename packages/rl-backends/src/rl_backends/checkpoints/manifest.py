"""The files of a checkpoint and its marker, which says what must be in the folder and what model and mesh wrote it.

    <folder>/rank-00000-of-00002.safetensors    boxes of tensors: key `<tensor>@<offset>,<offset>`
    <folder>/tensors.json                       dtype, shape and boxes of each tensor, and the file of each box
    <folder>/state.json                         everything that is not a tensor
    <folder>/checkpoint.json                    the marker

A folder is a checkpoint if it has the marker, which is written last and appears with the folder, by one rename. It
holds the size and SHA-256 of every other file, and the SHA-256 of its own text.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.errors import CheckpointError
from rl_backends.loading.source import is_plain_name

MARKER, INDEX, STATE = "checkpoint.json", "tensors.json", "state.json"
FORMAT, FORMAT_VERSION = "rl-backends checkpoint", 1

DAMAGED = "restore it from a copy, or resume from another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Name, size and digest of a file that was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of the marker."""

    version: int
    """Optimizer steps that the weights have seen."""
    mesh: dict[str, Any]
    """`ranks`, and the `axes` with their sizes."""
    model: dict[str, list[Any]]
    """Fingerprint: name -> [dtype, shape] of every parameter and persistent buffer."""
    torch: str = str(torch.__version__)
    """Release of torch that wrote it."""
    written_at_ns: int = 0
    """When the checkpoint was completed, in nanoseconds since 1970."""
    files: tuple[FileRecord, ...] = ()
    """All other files of the folder."""


# ---- Files that are on disk when the call returns.


def write_safetensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors into a new file, from their own memory without a copy; wait until it is on disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # its own name for an error of the operating system
        raise OSError(f"{path} cannot be written: {error}") from error
    sync([path])


def record_of(path: Path) -> FileRecord:
    """Of a file that was written; the digest is read from the file, so that it is that of what a reader gets."""
    return FileRecord(name=path.name, num_bytes=path.stat().st_size, sha256=digest_of(path))


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a value as JSON into a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(json.dumps(value).encode())
    sync([path])
    return record_of(path)


def sync(paths: Iterable[Path]) -> None:
    """Wait until files, and the names in folders, are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(body: Mapping[str, Any]) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; {DAMAGED}") from error


# ---- The marker.


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as a complete checkpoint."""
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    write_json(folder / MARKER, {**body, "sha256": text_digest(body)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint of this format."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint; find_latest(parent) names the newest complete one")
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{folder}: unfinished, or no checkpoint: it has no {MARKER}, which is written last; resume from another"
        )
    body = read_json(marker)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{marker}: not the marker of a checkpoint of rl-backends; give the folder of one")
    if (found := body.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"{marker}: format version {found}, and this release reads {FORMAT_VERSION}: read it with "
            f"the release of rl-backends that wrote it"
        )
    digest = body.pop("sha256", None)
    if digest != text_digest(body):
        raise CheckpointError(f"{marker}: damaged: its text is not the one whose digest it holds; {DAMAGED}")
    del body["format"], body["format_version"]
    try:
        if strange := [record["name"] for record in body["files"] if not is_plain_name(record["name"])]:
            raise CheckpointError(
                f"{marker}: names {strange[0]!r}, which is no file of its own folder; only files of {folder} are read"
            )
        return Manifest(**{**body, "files": tuple(FileRecord(**record) for record in body["files"])})
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{marker}: damaged: {type(error).__name__}: {error}; {DAMAGED}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file is there and has its size."""
    for record in manifest.files:
        path = folder / record.name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though the checkpoint was complete; {DAMAGED}")
        if (size := path.stat().st_size) != record.num_bytes:
            kind = "truncated" if size < record.num_bytes else "longer than what was written"
            raise CheckpointError(f"{path}: {size} bytes, and {record.num_bytes} were written: {kind}; {DAMAGED}")


def check_digest(folder: Path, record: FileRecord) -> None:
    """Check that a file has the bytes that were written."""
    path = folder / record.name
    try:
        digest = digest_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; {DAMAGED}") from error
    if digest != record.sha256:
        raise CheckpointError(
            f"{path}: damaged: its SHA-256 is {digest[:16]}..., and that of what was written {record.sha256[:16]}...; "
            f"{DAMAGED}"
        )


def check_model(folder: Path, saved: Mapping[str, list[Any]], here: Mapping[str, list[Any]]) -> None:
    """Check that the checkpoint is of this model: names, shapes and dtypes."""
    if saved == here:
        return
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in here]
    differences += [f"{name} is only in this model" for name in here if name not in saved]
    differences += [
        f"{name} is {' '.join(map(str, saved[name]))} in the checkpoint and {' '.join(map(str, here[name]))} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    raise CheckpointError(
        f"{folder}: a checkpoint of another model: {'; '.join(differences[:3])}{more}. Build the model that wrote "
        f"it, in the same dtype, or choose another checkpoint"
    )
