"""The folders of checkpoints on disk: atomic writes, completeness, and the logs that go back to a checkpoint.

    checkpoints/step_00000040/   policy/ (weights, optimizer, schedule: the backend's own format, for any mesh)
                                 progress.json   progress.safetensors   complete.json
    checkpoints/stage_start/     policy/ of the weights that a stage began with, while that stage is held to them
    checkpoints/in_step_.../     as the first, of a run that failed in the middle of a batch: weights, not to go on from

`complete.json` is written last; it has the size and digest of every other file, of `policy/` that of its own marker,
which in turn has those of the weights.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

__all__ = [
    "POLICY",
    "Checkpoint",
    "CheckpointError",
    "appearing",
    "digest_of",
    "find_latest",
    "list_checkpoints",
    "mark_complete",
    "read_checkpoint",
    "root_of",
    "sync",
    "unfinished_name",
    "unfinished_of",
    "write_text",
]


def unfinished_name(folder: Path) -> str:
    """Under which a folder is written, beside its target."""
    return f".{folder.name}.unfinished"


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write in that takes the name `folder` when the block ends well, and is removed when it does not.

    What is there under that name goes when the new one is whole. A kill leaves the unfinished name or the whole folder.
    """
    unfinished = folder.with_name(unfinished_name(folder))
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.mkdir()
        yield unfinished
        _sync_tree(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of what is there."""
    unfinished = path.with_name(unfinished_name(path))
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)


POLICY, MARKER, STAGE_START = "policy", "complete.json", "stage_start"
FORMAT, FORMAT_VERSION = "rl-launcher checkpoint", 1
_NAME = re.compile(r"step_\d{8,}")
_UNREAD = "restore it from a copy, or delete that folder to go on from an earlier checkpoint"


class CheckpointError(Refusal):
    """A checkpoint that is torn, damaged or not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, without its tensors."""

    folder: Path
    stage: str | None
    """The stage of its last step; None before the first."""
    step: int
    """Of that stage."""
    total: int
    """Steps over all stages."""
    version: int
    """Optimizer steps that its weights have seen."""
    metric: float | None
    """The last value of `checkpointing.metric_name` before it."""

    def describe(self) -> str:
        """Where it stands, in words."""
        return "the beginning" if self.stage is None else f"step {self.step} of {self.stage}"


def root_of(run: RunDirectory) -> Path:
    """Where the checkpoints of a run lie."""
    return run.path / "checkpoints"


def folder_name(total: int) -> str:
    """What the checkpoint after so many steps is called."""
    return f"step_{total:08d}"


def mark_complete(folder: Path, about: dict[str, Any]) -> None:
    """Write the marker of a folder that has everything else, which is on disk already."""
    files = {name: [(folder / name).stat().st_size, digest_of(folder / name)] for name in _marked(folder)}
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **about, "files": files}
    (folder / MARKER).write_text(json.dumps({**body, "sha256": _digest(body)}), encoding="utf-8")


def list_checkpoints(run: RunDirectory) -> list[Checkpoint]:
    """Those to go on from, oldest first.

    Raises:
        CheckpointError: one that was whole is damaged.
    """
    folders = [path for path in root_of(run).glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(map(read_checkpoint, folders), key=lambda each: each.total)


def find_latest(run: RunDirectory) -> Checkpoint | None:
    """The one to go on from; None where there is none.

    Raises:
        CheckpointError: one is damaged: it is named, and never passed over in silence.
    """
    found = list_checkpoints(run)
    return found[-1] if found else None


def unfinished_of(run: RunDirectory) -> list[Path]:
    """What a kill in the middle of a save left; it is never read."""
    return sorted(root_of(run).glob(unfinished_name(Path("*"))))


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a folder says of itself, its small files compared with their digests.

    Raises:
        CheckpointError: it is torn, damaged, or of another format.
    """
    body = _read_marker(folder)
    for name, (num_bytes, digest) in body["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != num_bytes or digest_of(path) != digest:
            raise CheckpointError(f"{path} is not what was written: missing or damaged; {_UNREAD}")
    names = ("stage", "step", "total", "version", "metric")
    return Checkpoint(folder=folder, **{name: body[name] for name in names})


def _read_marker(folder: Path) -> dict[str, Any]:
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{folder} is torn, or no checkpoint: it has no {MARKER}, which is written last; {_UNREAD}"
        )
    try:
        body: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        digest, kind, version = body.pop("sha256"), body["format"], body["format_version"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged: {error}; {_UNREAD}") from error
    if digest != _digest(body):
        raise CheckpointError(f"{marker} is damaged: its text is not the one whose digest it holds; {_UNREAD}")
    if (kind, version) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{marker} is of format {kind} {version}, and this release reads {FORMAT} {FORMAT_VERSION}: go on with the "
            f"release of rl-launcher that wrote it"
        )
    return body


def _marked(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        # The backend's marker has the digests of its other files, which are too large to be read twice.
        if path.is_file() and (inside[0] != POLICY or inside[1:] == ("checkpoint.json",)):
            yield "/".join(inside)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
