"""Whether the disk has room for what a run will write. Knows bytes, and no models."""

import shutil
from pathlib import Path

from rl_launcher.errors import LauncherError
from rl_launcher.recipe_schema import CheckpointingConfig

__all__ = ["STATE_PER_WEIGHT", "DiskSpaceError", "bytes_needed", "check_space", "describe_space"]

STATE_PER_WEIGHT = 3
"""A checkpoint has at least the weights and the two moments of AdamW, in the dtype of the weights."""


class DiskSpaceError(LauncherError):
    """A disk that has too little room."""


def bytes_needed(*, checkpoint_bytes: int, model_bytes: int, config: CheckpointingConfig) -> int:
    """What a run may have on disk at once: all that it keeps, one more while that is written, and the model.

    A run that saves nothing while all goes well still leaves one checkpoint when it ends early.
    """
    saves = config.save_period > 0 or config.save_period_s is not None
    kept = config.ft_keep_latest_k + config.keep_top_k if saves else 0
    return checkpoint_bytes * (kept + 1) + model_bytes


def check_space(
    folder: Path,
    *,
    checkpoint_bytes: int,
    model_bytes: int,
    config: CheckpointingConfig,
    free_bytes: int | None = None,
) -> None:
    """Refuse before the first step what could not be saved after it.

    Args:
        folder: of the run; it exists.
        checkpoint_bytes: of one checkpoint, at least.
        model_bytes: of the trained model.
        config: how many are kept.
        free_bytes: None asks the disk.

    Raises:
        DiskSpaceError: saying how much is needed and how much is free.
    """
    needed = bytes_needed(checkpoint_bytes=checkpoint_bytes, model_bytes=model_bytes, config=config)
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < needed:
        raise DiskSpaceError(
            f"{folder} has {_in_words(free)} free, and the run needs at least {_in_words(needed)}: checkpoints of "
            f"{_in_words(checkpoint_bytes)} each, of which checkpointing.ft_keep_latest_k={config.ft_keep_latest_k} "
            f"and keep_top_k={config.keep_top_k} are kept and one more is written, and a model of "
            f"{_in_words(model_bytes)}. "
            f"Free some, keep fewer, or choose a run_dir on another disk"
        )


def describe_space(folder: Path) -> str:
    """How much is free, for the message of a disk that is full."""
    try:
        return f"{_in_words(shutil.disk_usage(folder).free)} are free in {folder}"
    except OSError as error:
        return f"{folder} cannot be asked for its free space: {error}"


def _in_words(num_bytes: int) -> str:
    value, units = float(num_bytes), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
