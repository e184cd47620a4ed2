"""The marker of a complete checkpoint: what lies in its folder, and what model and mesh wrote it.

A folder is a checkpoint when it has this file, which is written last and appears with the folder, by one rename. It
says the size and digest of every other file and, by a digest of its own text, that it is itself undamaged.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rl_backends.checkpoints.files import FileRecord, digest_of, write_json
from rl_backends.errors import CheckpointError
from rl_backends.file_names import is_plain_name

__all__ = [
    "DAMAGED",
    "FORMAT_VERSION",
    "INDEX",
    "MARKER",
    "STATE",
    "Manifest",
    "check_digest",
    "check_model",
    "check_sizes",
    "read_json",
    "read_manifest",
    "write_manifest",
]

MARKER, INDEX, STATE = "checkpoint.json", "tensors.json", "state.json"
FORMAT, FORMAT_VERSION = "rl-backends checkpoint", 1

DAMAGED = "restore it from a copy, or resume from another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is, without its numbers."""

    version: int
    """Optimizer steps that its weights have seen."""
    written_at_ns: int
    """When it was completed, in nanoseconds since 1970."""
    torch: str
    """Release of torch that wrote it."""
    mesh: dict[str, Any]
    """`ranks`, and the `axes` with their sizes."""
    model: dict[str, list[Any]]
    """Fingerprint: name -> [dtype, shape] of every parameter and persistent buffer."""
    weights: bool
    """It holds them, and not the optimizers alone."""
    files: tuple[FileRecord, ...]
    """All other files of the folder."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as complete.

    Raises:
        OSError: it cannot be written.
    """
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(manifest)}
    write_json(folder / MARKER, {**body, "sha256": _digest(body)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint of this format.

    Raises:
        CheckpointError: absent, unfinished, damaged, of a format that this release does not know, or with names of
            files that lie elsewhere.
    """
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
    if digest != _digest(body):
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
    """Every file is there, with its size.

    Raises:
        CheckpointError: one is missing or has another size.
    """
    for record in manifest.files:
        path = folder / record.name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though the checkpoint was complete; {DAMAGED}")
        if path.stat().st_size != record.num_bytes:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, and {record.num_bytes} were written: truncated; {DAMAGED}"
            )


def check_digest(folder: Path, record: FileRecord) -> None:
    """A file has the bytes that were written.

    Raises:
        CheckpointError: it has not.
    """
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


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        CheckpointError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; {DAMAGED}") from error


def check_model(folder: Path, saved: Mapping[str, list[Any]], here: Mapping[str, list[Any]]) -> None:
    """The model of the checkpoint is this one: names, shapes and dtypes.

    Raises:
        CheckpointError: it is another; the first differences are listed.
    """
    if saved == here:
        return
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in here]
    differences += [f"{name} is only in this model" for name in here if name not in saved]
    differences += [
        f"{name} is {_told(saved[name])} in the checkpoint and {_told(here[name])} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    raise CheckpointError(
        f"{folder}: a checkpoint of another model: {'; '.join(differences[:3])}{more}. Build the model that wrote "
        f"it, in the same dtype, or choose another checkpoint"
    )


def _told(entry: list[Any]) -> str:
    dtype, shape = entry
    return f"{dtype} {cast('list[int]', shape)}"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
