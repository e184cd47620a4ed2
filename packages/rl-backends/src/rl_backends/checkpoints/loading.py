"""Load a checkpoint into a model of torch on any mesh, or refuse it before anything is changed.

Knows what of a model, its optimizers and the generators of random numbers is to be read; how is the affair of
`reading`.
"""

from pathlib import Path

from torch import nn

from rl_backends.checkpoints.frozen_weights import check_frozen_weights
from rl_backends.checkpoints.manifest import check_model
from rl_backends.checkpoints.optimizer_state import (
    CheckpointedOptimizers,
    State,
    check_optimizers,
    new_state,
    put_state,
)
from rl_backends.checkpoints.pieces import Held, Piece, device_of, has_rng, held_by, mesh_of, rng_pieces, set_rng
from rl_backends.checkpoints.reading import CheckpointState, OpenCheckpoint, check_holds, open_checkpoint, read_pieces
from rl_backends.checkpoints.together import fingerprint, on_all
from rl_backends.errors import CheckpointError

__all__ = ["load_checkpoint"]


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
    opened = open_checkpoint(folder, verify=verify)
    held = held_by(model)
    kept = optimizers if optimizer else None

    def check() -> None:
        check_model(opened.source, opened.manifest.model, fingerprint(held))
        check_holds(opened, weights=weights, optimizer=optimizer, has_optimizers=optimizers is not None)
        if kept is not None:
            _check_optimizers(opened, kept, held)

    on_all(check, group=opened.group)
    frozen: dict[str, int] = opened.state.get("frozen", {})
    if frozen:
        check_frozen_weights(opened.source, frozen, model, group=opened.group)
    rng = rng_pieces(device_of(held)) if has_rng(opened.index, device_of(held)) else {}
    states, pieces = on_all(lambda: _new_state(opened, kept, held), group=opened.group)
    pieces |= rng
    if weights:
        pieces |= {f"weights/{name}": each.piece() for name, each in held.items() if name not in frozen}
    read_pieces(opened, pieces, schedule=kept)
    if kept is not None:
        put_state(kept, held, opened.state["optimizers"], states=states)
    set_rng(rng)
    model.zero_grad()
    return opened.told(rng_restored=bool(rng))


def _check_optimizers(opened: OpenCheckpoint, optimizers: CheckpointedOptimizers, held: dict[str, Held]) -> None:
    same_mesh = opened.manifest.mesh == mesh_of(held)
    try:
        check_optimizers(optimizers, held, opened.state["optimizers"], same_mesh=same_mesh)
    except CheckpointError as error:
        raise CheckpointError(f"{opened.source}: {error}") from error


def _new_state(
    opened: OpenCheckpoint, optimizers: CheckpointedOptimizers | None, held: dict[str, Held]
) -> tuple[list[State], dict[str, Piece]]:
    return ([], {}) if optimizers is None else new_state(optimizers, held, opened.state["optimizers"])
