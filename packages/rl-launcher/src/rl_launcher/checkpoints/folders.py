"""The folders of checkpoints on disk: their layout, and digests that prove them complete.

    checkpoints/step_00000040/   policy/ (weights, optimizer, schedule: the backend's own format, for any mesh)
                                 reward_model/ or critic/ likewise, in a stage that trains one
                                 progress.json   progress.safetensors   complete.json
    checkpoints/stage_start/     policy/ with the weights that a stage started with, while that stage needs them
    checkpoints/in_step_.../     like the first, from a run that failed within a batch: cannot be resumed from

`complete.json` is written last. It has the size and digest of every other file, except that of `policy/` and of other
models it only has those of the backend's own marker, which in turn has those of the weights.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl_backends
from rl_backends.checkpoints.folders import read_marker, records_of, unfinished_name, write_marker
from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

POLICY, MARKER, STAGE_START = "policy", "complete.json", "stage_start"
FORMAT = ("rl-launcher checkpoint", 1)
MODEL_MARKER = "checkpoint.json"
"""The marker that a backend writes into its own folder."""
_NAME = re.compile(r"step_\d{8,}")
_REMEDY = "restore it from a copy, or delete that folder to resume from an earlier checkpoint"


class CheckpointError(Refusal):
    """A checkpoint of a run is incomplete, damaged or missing."""


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


def mark_complete(folder: Path, about: dict[str, Any]) -> None:
    """Write the marker of a folder whose other files are written."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    # A backend's marker has the digests of its other files, which are too large to be read twice.
    models = {path.parent for path in files if path.name == MODEL_MARKER}
    files = [path for path in files if path.name == MODEL_MARKER or not models & {*path.parents}]
    write_marker(folder / MARKER, about, format=FORMAT, files=records_of(folder, files))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the marker of a checkpoint, and compare its small files with their digests.

    Raises:
        CheckpointError: it is incomplete, damaged, or of another format.
    """
    try:
        body = read_marker(folder / MARKER, format=FORMAT, remedy=_REMEDY)
    except rl_backends.CheckpointError as error:
        raise CheckpointError(str(error)) from error
    names = ("stage", "step", "total", "version", "metric")
    return Checkpoint(folder=folder, **{name: body[name] for name in names})
