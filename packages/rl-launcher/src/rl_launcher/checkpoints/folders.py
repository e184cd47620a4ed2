"""The folders of checkpoints on disk: their layout, and digests that prove them complete.

    checkpoints/step_00000040/   policy/ (weights, optimizer, schedule: the backend's own format, for any mesh)
                                 progress.json   progress.safetensors   complete.json
    checkpoints/stage_start/     policy/ with the weights that a stage started with, while that stage needs them
    checkpoints/in_step_.../     like the first, from a run that failed within a batch: cannot be resumed from

`complete.json` is written last. It has the size and digest of every other file, except that of `policy/` it only has
those of the backend's own marker, which in turn has those of the weights.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backends.checkpoints.atomic import unfinished_name
from rl_backends.checkpoints.files import digest_of
from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

POLICY, MARKER, STAGE_START = "policy", "complete.json", "stage_start"
FORMAT, FORMAT_VERSION = "rl-launcher checkpoint", 1
_NAME = re.compile(r"step_\d{8,}")
_REMEDY = "restore it from a copy, or delete that folder to resume from an earlier checkpoint"


class CheckpointError(Refusal):
    """A checkpoint is incomplete, damaged or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, without its tensors."""

    folder: Path
    stage: str | None
    """The stage of its last step, or None before the first step."""
    step: int
    """The step within that stage."""
    total: int
    """Steps over all stages."""
    version: int
    """Optimizer steps that its weights have seen."""
    metric: float | None
    """The last value of `checkpointing.metric_name` before it."""

    def describe(self) -> str:
        """Return where in the run it was written."""
        return "the beginning" if self.stage is None else f"step {self.step} of {self.stage}"


def root_of(run: RunDirectory) -> Path:
    """Return the folder of a run's checkpoints."""
    return run.path / "checkpoints"


def folder_name(total: int) -> str:
    """Return the name of the checkpoint after `total` steps over all stages."""
    return f"step_{total:08d}"


def list_checkpoints(run: RunDirectory) -> list[Checkpoint]:
    """Return the checkpoints that a run can be resumed from, oldest first.

    Raises:
        CheckpointError: one of them is damaged.
    """
    folders = [path for path in root_of(run).glob("step_*") if _NAME.fullmatch(path.name)]
    return sorted(map(read_checkpoint, folders), key=lambda each: each.total)


def find_latest(run: RunDirectory) -> Checkpoint | None:
    """Return the newest checkpoint, or None if there is none.

    Raises:
        CheckpointError: one of them is damaged. It is never skipped silently.
    """
    found = list_checkpoints(run)
    return found[-1] if found else None


def unfinished_of(run: RunDirectory) -> list[Path]:
    """Return the folders that a kill during a save left. They are never read."""
    return sorted(root_of(run).glob(unfinished_name(Path("*"))))


# ---- Complete or not: the marker.


def mark_complete(folder: Path, about: dict[str, Any]) -> None:
    """Write the marker of a folder whose other files are written."""
    files = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).parts
        # The backend's marker has the digests of its other files, which are too large to be read twice.
        if path.is_file() and (inside[0] != POLICY or inside[1:] == ("checkpoint.json",)):
            files["/".join(inside)] = [path.stat().st_size, digest_of(path)]
    body = {"format": FORMAT, "format_version": FORMAT_VERSION, **about, "files": files}
    (folder / MARKER).write_text(json.dumps({**body, "sha256": _digest(body)}), encoding="utf-8")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the marker of a checkpoint, and compare its small files with their digests.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another format.
    """
    marker = folder / MARKER
    if not marker.is_file():
        raise CheckpointError(
            f"{folder} is incomplete, or no checkpoint: it has no {MARKER}, which is written last; {_REMEDY}"
        )
    try:
        body: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        digest, kind, version = body.pop("sha256"), body["format"], body["format_version"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged: {error}; {_REMEDY}") from error
    if digest != _digest(body):
        raise CheckpointError(f"{marker} is damaged: its digest does not match its text; {_REMEDY}")
    if (kind, version) != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{marker} has format {kind} {version}, and this release reads {FORMAT} {FORMAT_VERSION}: resume with the "
            f"release of rl-launcher that wrote it"
        )
    for name, (num_bytes, file_digest) in body["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != num_bytes or digest_of(path) != file_digest:
            raise CheckpointError(f"{path} is not what was written: missing or damaged; {_REMEDY}")
    names = ("stage", "step", "total", "version", "metric")
    return Checkpoint(folder=folder, **{name: body[name] for name in names})


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
