"""Load a checkpoint into a model on any mesh, or refuse it before anything is changed.

Knows what may be wrong with a checkpoint; the files are the affair of `storage` and `manifest`. Each rank reads the
boxes that it holds; the ranks share out the files whose digests are checked.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backends.checkpoints.manifest import (
    DAMAGED,
    INDEX,
    MARKER,
    STATE,
    Manifest,
    check_digest,
    check_model,
    check_sizes,
    read_json,
    read_manifest,
)
from rl_backends.checkpoints.optimizer_state import (
    CheckpointedOptimizers,
    State,
    check_optimizers,
    new_state,
    put_state,
)
from rl_backends.checkpoints.pieces import Held, Piece, has_rng, held_by, mesh_of, rng_pieces, set_rng, this_rank
from rl_backends.checkpoints.planners import PieceLoadPlanner
from rl_backends.checkpoints.saving import idle_group
from rl_backends.checkpoints.storage import CheckpointReader, metadata_of
from rl_backends.checkpoints.together import fingerprint, on_all, told
from rl_backends.errors import CheckpointError
from rl_backends.ranks import gather_text

__all__ = ["CheckpointState", "load_checkpoint"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is to be loaded, and into what."""

    optimizers: CheckpointedOptimizers | None
    weights: bool
    optimizer: bool


def load_checkpoint(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    folder: str | Path,
    *,
    weights: bool = True,
    optimizer: bool = True,
    verify: bool = True,
) -> CheckpointState:
    """Put what a checkpoint holds into a model, its optimizers and the generators of random numbers, in place.

    Every rank must call it; the mesh may be any. Gradients are cleared. Betas, weight decay and what else a group of
    parameters has must be those of the checkpoint. Its learning rate holds until the schedule, which goes on from the
    checkpoint's step, sets another.

    Args:
        model: built as the one that wrote it, sharded as you like.
        optimizers: as when it was written; None where there is none.
        folder: of the checkpoint.
        weights: False leaves the weights as they are.
        optimizer: False leaves optimizers and schedule as they are, whatever the checkpoint has of them.
        verify: compare the digest of every file, which reads each once more.

    Raises:
        CheckpointError: on every rank, with the reason: absent, unfinished, damaged, of another model, of other
            optimizers or hyperparameters, of an unknown format, without what was asked for, or with more. Nothing has
            changed then, unless a file became unreadable after it was checked, which the message tells.
    """
    group = idle_group()
    source = Path(folder)
    manifest = on_all(lambda: read_manifest(source), group=group)
    if len(set(gather_text(str(manifest.written_at_ns), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different checkpoints ({source} here): give all the same one")
    on_all(lambda: _check_files(source, manifest, verify=verify), group=group)
    held = held_by(model)
    state, index = on_all(lambda: (read_json(source / STATE), read_json(source / INDEX)), group=group)
    kept = optimizers if optimizer else None
    asked = _Asked(optimizers=kept, weights=weights, optimizer=optimizer)
    on_all(lambda: _check_contents(source, manifest, held, state=state, asked=asked), group=group)
    rng = rng_pieces(held) if has_rng(index, held, ranks=_ranks()) else {}
    states, pieces = on_all(lambda: _new_state(kept, held, state), group=group)
    pieces |= rng
    if weights:
        pieces |= {f"weights/{name}": each.piece() for name, each in held.items()}
    reader = on_all(lambda: _reader(source, manifest, index), group=group)
    on_all(lambda: _check_pieces(source, index, pieces), group=group)
    _move_schedule(kept, state, group)
    _read(reader, pieces, source=source, group=group)
    if kept is not None:
        put_state(kept, held, state["optimizers"], states=states)
    set_rng(rng)
    model.zero_grad()
    return CheckpointState(
        version=manifest.version,
        extra=state["extra"],
        mesh=manifest.mesh,
        rng_restored=bool(rng),
        torch=manifest.torch,
    )


def _check_files(source: Path, manifest: Manifest, *, verify: bool) -> None:
    check_sizes(source, manifest)
    if verify:
        for record in manifest.files[this_rank() :: _ranks()]:
            check_digest(source, record)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _check_contents(
    source: Path,
    manifest: Manifest,
    held: dict[str, Held],
    *,
    state: dict[str, Any],
    asked: _Asked,
) -> None:
    check_model(source, manifest.model, fingerprint(held))
    if asked.weights and not manifest.weights:
        raise CheckpointError(
            f"{source} holds no weights, which were left out: load them elsewhere, with weights=False"
        )
    if asked.optimizers is None:
        if asked.optimizer and state["optimizers"] is not None:
            raise CheckpointError(
                f"{source} holds the state of an optimizer, and there is none here to take it: call start_training "
                f"first, or leave it behind with optimizer=False"
            )
        return
    if state["optimizers"] is None:
        raise CheckpointError(
            f"{source} holds no state of optimizers, only weights: load it with optimizer=False, and training starts "
            f"with fresh moments"
        )
    try:
        check_optimizers(asked.optimizers, held, state["optimizers"], same_mesh=manifest.mesh == mesh_of(held))
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _new_state(
    optimizers: CheckpointedOptimizers | None, held: dict[str, Held], state: dict[str, Any]
) -> tuple[list[State], dict[str, Piece]]:
    return ([], {}) if optimizers is None else new_state(optimizers, held, state["optimizers"])


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


def _move_schedule(
    optimizers: CheckpointedOptimizers | None, state: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Before anything is read, since it may refuse; then it stands where it stood, on every rank."""
    if optimizers is None:
        return
    before = optimizers.schedule_state()
    try:
        on_all(lambda: optimizers.load_schedule_state(state["schedule"]), group=group)
    except CheckpointError:
        if optimizers.schedule_state() != before:
            optimizers.load_schedule_state(before)
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
