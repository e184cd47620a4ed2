"""A marker file that proves a folder complete: the size and digest of its other files, and a digest of its own text."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_backends.checkpoints.files import digest_of
from rl_backends.errors import CheckpointError


def write_marker(marker: Path, about: dict[str, Any], *, format: tuple[str, int], files: Iterable[Path]) -> None:  # noqa: A002
    """Write the marker of a folder whose other files are written.

    Args:
        marker: the new file, in that folder.
        about: further content, as JSON.
        format: name and version of the folder's layout.
        files: those in the folder that the marker vouches for.
    """
    sizes = {path.relative_to(marker.parent).as_posix(): [path.stat().st_size, digest_of(path)] for path in files}
    body = {"format": format[0], "format_version": format[1], **about, "files": sizes}
    marker.write_text(json.dumps({**body, "sha256": _digest(body)}), encoding="utf-8")


def read_marker(marker: Path, *, format: tuple[str, int], remedy: str) -> dict[str, Any]:  # noqa: A002
    """Read a marker, and compare the files with their digests.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or of another format; the message ends with `remedy`.
    """
    if not marker.is_file():
        raise CheckpointError(
            f"{marker.parent} is incomplete, or no checkpoint: it has no {marker.name}, which is written last; {remedy}"
        )
    try:
        body: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        digest, written = body.pop("sha256"), (body["format"], body["format_version"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged: {error}; {remedy}") from error
    if digest != _digest(body):
        raise CheckpointError(f"{marker} is damaged: its digest does not match its text; {remedy}")
    if written != format:
        raise CheckpointError(
            f"{marker} has format {written[0]} {written[1]}, and this release reads {format[0]} {format[1]}: resume "
            f"with the release that wrote it"
        )
    for name, (num_bytes, file_digest) in body["files"].items():
        path = marker.parent / name
        if not path.is_file() or path.stat().st_size != num_bytes or digest_of(path) != file_digest:
            raise CheckpointError(f"{path} is not what was written: missing or damaged; {remedy}")
    return body


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
