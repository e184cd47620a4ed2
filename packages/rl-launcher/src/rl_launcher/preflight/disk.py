"""Whether the disk of the run directory has room for what the run will save."""

from pathlib import Path

from rl_launcher.checkpointing.space import STATE_PER_WEIGHT, check_space
from rl_launcher.preflight.models import KnownModel
from rl_launcher.recipe_schema import Recipe

__all__ = ["check_disk"]

WEIGHT_BYTES = 4


def check_disk(recipe: Recipe, *, model: KnownModel, free_bytes: int | None = None) -> None:
    """Refuse a run whose checkpoints and model would not fit; `free_bytes` None asks the disk.

    Raises:
        DiskSpaceError: saying how much is needed and how much is free.
    """
    if not recipe.stages:
        return
    weights = model.parameters * WEIGHT_BYTES
    check_space(
        _existing(Path(recipe.run_dir).expanduser().absolute()),
        checkpoint_bytes=_checkpoint_bytes(model),
        model_bytes=weights,
        config=recipe.checkpointing,
        free_bytes=free_bytes,
    )


def _checkpoint_bytes(model: KnownModel) -> int:
    if model.adapters is None:
        return model.parameters * WEIGHT_BYTES * STATE_PER_WEIGHT
    return model.adapters.frozen_bytes + model.adapters.trainable_bytes * STATE_PER_WEIGHT


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())
