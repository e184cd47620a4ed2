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
    INDEX,
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
from rl_backends.checkpoints.pieces import Held, Piece, held_by, mesh_of, rng_pieces, set_rng, this_rank
from rl_backends.checkpoints.planners import PieceLoadPlanner
from rl_backends.checkpoints.saving import idle_group
from rl_backends.checkpoints.storage import CheckpointReader
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
    """Whether the generators of random numbers go on where they stood; only on as many ranks as wrote it."""
    torch: str
    """Release of torch that wrote it."""


def load_checkpoint(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    folder: str | Path,
    *,
    weights: bool = True,
    verify: bool = True,
) -> CheckpointState:
    """Put what a checkpoint holds into a model, its optimizers and the generators of random numbers, in place.

    Every rank must call it; the mesh may be any. All hyperparameters of the optimizers become those of the checkpoint.

    Args:
        model: built as the one that wrote it, sharded as you like.
        optimizers: as when it was written; None leaves the optimizers' state alone.
        folder: of the checkpoint.
        weights: False leaves the weights as they are.
        verify: compare the digest of every file, which reads each once more.

    Raises:
        CheckpointError: on every rank, with the reason: absent, unfinished, damaged, of another model, of other
            optimizers, of an unknown format, or without what was asked for. Nothing has changed then, unless a file
            became unreadable after it was checked, which the message tells.
    """
    group = idle_group()
    source = Path(folder)
    manifest = on_all(lambda: read_manifest(source), group=group)
    if len(set(gather_text(str(manifest.written_at_ns), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different checkpoints ({source} here): give all the same one")
    on_all(lambda: _check_files(source, manifest, verify=verify), group=group)
    held = held_by(model)
    state = on_all(lambda: read_json(source / STATE), group=group)
    on_all(
        lambda: _check_contents(source, manifest, held, optimizers=optimizers, state=state, weights=weights),
        group=group,
    )
    states, pieces = on_all(lambda: _begin(optimizers, held, state), group=group)
    rng = rng_pieces(held) if manifest.mesh["ranks"] == mesh_of(held)["ranks"] else {}
    if weights:
        pieces |= {f"weights/{name}": each.piece() for name, each in held.items()}
    _read(source, {**pieces, **rng}, group)
    if optimizers is not None:
        put_state(optimizers, held, state["optimizers"], states=states)
    set_rng(rng)
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
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for record in manifest.files[this_rank() :: ranks]:
            check_digest(source, record)


def _check_contents(
    source: Path,
    manifest: Manifest,
    held: dict[str, Held],
    *,
    optimizers: CheckpointedOptimizers | None,
    state: dict[str, Any],
    weights: bool,
) -> None:
    check_model(source, manifest.model, fingerprint(held))
    if weights and not manifest.weights:
        raise CheckpointError(
            f"{source} holds no weights, which were left out: load them elsewhere, with weights=False"
        )
    if optimizers is None:
        return
    if state["optimizers"] is None:
        raise CheckpointError(
            f"{source} holds no state of optimizers, only weights: load it with optimizers=None, and training starts "
            f"with fresh moments"
        )
    try:
        check_optimizers(optimizers, held, state["optimizers"], same_mesh=manifest.mesh == mesh_of(held))
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error


def _begin(
    optimizers: CheckpointedOptimizers | None, held: dict[str, Held], state: dict[str, Any]
) -> tuple[list[State], dict[str, Piece]]:
    """The schedule, which may refuse, and room for the state of the optimizers."""
    if optimizers is None:
        return [], {}
    optimizers.load_schedule_state(state["schedule"])
    return new_state(optimizers, held, state["optimizers"])


@torch.no_grad()
def _read(source: Path, pieces: dict[str, Piece], group: dist.ProcessGroup | None) -> None:
    reader = CheckpointReader(source, on_all(lambda: read_json(source / INDEX), group=group))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is as it should be
            load(pieces, storage_reader=reader, planner=PieceLoadPlanner(), process_group=group)
    except (CheckpointException, RuntimeError) as error:
        raise CheckpointError(
            f"{source} could not be read: {told(error)}. Weights may be in part those of the checkpoint: build the "
            f"model anew before you go on"
        ) from error
