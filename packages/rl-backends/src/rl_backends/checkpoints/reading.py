"""Read a checkpoint into memory, or refuse it before anything is changed.

Knows what may be wrong with a checkpoint, and not what a model or an optimizer is; the files are the affair of
`storage` and `manifest`. Each rank reads the boxes that it holds; the ranks share out the files whose digests are
checked.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backends.checkpoints.manifest import (
    DAMAGED,
    INDEX,
    MARKER,
    STATE,
    Manifest,
    check_digest,
    check_sizes,
    read_json,
    read_manifest,
)
from rl_backends.checkpoints.pieces import Piece, num_ranks, this_rank
from rl_backends.checkpoints.planners import PieceLoadPlanner
from rl_backends.checkpoints.storage import CheckpointReader, metadata_of
from rl_backends.checkpoints.together import on_all, told
from rl_backends.checkpoints.writing import idle_group
from rl_backends.errors import CheckpointError
from rl_backends.rank_agreement import gather_text

__all__ = ["CheckpointState", "OpenCheckpoint", "Scheduled", "check_holds", "open_checkpoint", "read_pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What a checkpoint said besides its tensors."""

    version: int
    """Optimizer steps that the weights have seen."""
    extra: dict[str, Any]
    """What `save_checkpoint` was given."""
    mesh: dict[str, Any]
    """Of the ranks that wrote it: `ranks`, and `axes` with their sizes."""
    rng_restored: bool
    """Whether the generators of random numbers go on where they stood; only on as many ranks as wrote it, and on the
    same kind of device."""
    torch: str
    """Release of torch that wrote it."""


@runtime_checkable
class Scheduled(Protocol):
    """What has a schedule."""

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule stands, as JSON."""

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Go on from what `schedule_state` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint that is complete and undamaged; nothing is known yet of whether it fits."""

    source: Path
    manifest: Manifest
    state: dict[str, Any]
    """What is no tensor: `extra`, `optimizers`, `schedule`."""
    index: dict[str, Any]
    """Dtype, shape and boxes of each piece."""
    group: dist.ProcessGroup | None
    """Over which the ranks speak of it."""

    def told(self, *, rng_restored: bool) -> CheckpointState:
        """What its reader is told."""
        return CheckpointState(
            version=self.manifest.version,
            extra=self.state["extra"],
            mesh=self.manifest.mesh,
            rng_restored=rng_restored,
            torch=self.manifest.torch,
        )


def open_checkpoint(folder: str | Path, *, verify: bool) -> OpenCheckpoint:
    """See that every rank was given the same complete checkpoint; every rank must call it.

    verify: compare the digest of every file, which reads each once more.

    Raises:
        CheckpointError: on every rank: absent, unfinished, damaged or of an unknown format.
    """
    group = idle_group()
    source = Path(folder)
    manifest = on_all(lambda: read_manifest(source), group=group)
    if len(set(gather_text(str(manifest.written_at_ns), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different checkpoints ({source} here): give all the same one")
    on_all(lambda: _check_files(source, manifest, verify=verify), group=group)
    state, index = on_all(lambda: (read_json(source / STATE), read_json(source / INDEX)), group=group)
    return OpenCheckpoint(source=source, manifest=manifest, state=state, index=index, group=group)


def check_holds(opened: OpenCheckpoint, *, weights: bool, optimizer: bool, has_optimizers: bool) -> None:
    """It has what is asked for, and no optimizer that would be lost.

    Raises:
        CheckpointError: it has not.
    """
    source, saved = opened.source, opened.state["optimizers"]
    if weights and not opened.manifest.weights:
        raise CheckpointError(
            f"{source} holds no weights, which were left out: load them elsewhere, with weights=False"
        )
    if optimizer and not has_optimizers and saved is not None:
        raise CheckpointError(
            f"{source} holds the state of an optimizer, and there is none here to take it: call start_training "
            f"first, or leave it behind with optimizer=False"
        )
    if optimizer and has_optimizers and saved is None:
        raise CheckpointError(
            f"{source} holds no state of optimizers, only weights: load it with optimizer=False, and training starts "
            f"with fresh moments"
        )


def read_pieces(opened: OpenCheckpoint, pieces: dict[str, Piece], *, schedule: Scheduled | None) -> None:
    """Fill this rank's pieces, in place, when all ranks have found theirs; every rank must call it.

    schedule: goes on where that of the checkpoint stood; None leaves it.

    Raises:
        CheckpointError: on every rank: something is not in the checkpoint or has another shape, or the schedule
            refuses; nothing has changed then, unless a file became unreadable, which the message tells.
    """
    source, index, group = opened.source, opened.index, opened.group
    reader = on_all(lambda: _reader(source, opened.manifest, index), group=group)
    on_all(lambda: _check_pieces(source, index, pieces), group=group)
    _move_schedule(schedule, opened.state, group)
    _read(reader, pieces, source=source, group=group)


def _check_files(source: Path, manifest: Manifest, *, verify: bool) -> None:
    check_sizes(source, manifest)
    if verify:
        for record in manifest.files[this_rank() :: num_ranks()]:
            check_digest(source, record)


def _reader(source: Path, manifest: Manifest, index: dict[str, Any]) -> CheckpointReader:
    reader = CheckpointReader(source, index)
    if unlisted := sorted(reader.files - {record.name for record in manifest.files}):
        raise CheckpointError(f"{source / INDEX}: names {unlisted[0]!r}, which {MARKER} does not list; {DAMAGED}")
    return reader


def _check_pieces(source: Path, index: dict[str, Any], pieces: dict[str, Piece]) -> None:
    """The checkpoint has all that this rank will read."""
    planner = PieceLoadPlanner()
    planner.set_up_planner(pieces, metadata_of(index))
    try:
        planner.create_local_plan()
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _move_schedule(schedule: Scheduled | None, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Before anything is read, since it may refuse; then it stands where it stood, on every rank."""
    if schedule is None:
        return
    before = schedule.schedule_state()
    try:
        on_all(lambda: schedule.load_schedule_state(state["schedule"]), group=group)
    except CheckpointError:
        if schedule.schedule_state() != before:
            schedule.load_schedule_state(before)
        raise


@torch.no_grad()
def _read(reader: CheckpointReader, pieces: dict[str, Piece], *, source: Path, group: dist.ProcessGroup | None) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is as it should be
            load(pieces, storage_reader=reader, planner=PieceLoadPlanner(), process_group=group)
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(
            f"{source} could not be read: {told(error)}. Weights may be in part those of the checkpoint: build the "
            f"model anew before you go on"
        ) from error
