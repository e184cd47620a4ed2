"""The run directory on disk: free space, and the lock that one process holds."""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_launcher.errors import Refusal
from rl_launcher.schema import CheckpointingConfig
from rl_observe import RunDirectory
from rl_observe.glossary import format_value

STATE_PER_WEIGHT = 3
"""A checkpoint has at least the weights and AdamW's two moments, in the dtype of the weights."""
CLAIM_FILE = ".claimed"


class DiskSpaceError(Refusal):
    """There is too little free space on a disk."""


def check_space(
    folder: Path,
    *,
    checkpoint_bytes: int,
    model_bytes: int,
    config: CheckpointingConfig,
    free_bytes: int | None = None,
) -> None:
    """Refuse before the first step a run whose checkpoints would not fit on the disk of `folder`.

    `checkpoint_bytes` is the least size of one checkpoint; `free_bytes=None` reads the disk.

    Raises:
        DiskSpaceError: with the needed and the free bytes.
    """
    # At most: the kept checkpoints, one that is being written, and the model. Without a save period, a run that stops
    # early still writes one.
    saves = config.save_period > 0 or config.save_period_s is not None
    kept = config.ft_keep_latest_k + config.keep_top_k if saves else 0
    needed = checkpoint_bytes * (kept + 1) + model_bytes
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < needed:
        there, least, each, model = (
            format_value(size, "bytes") for size in (free, needed, checkpoint_bytes, model_bytes)
        )
        raise DiskSpaceError(
            f"{folder} has {there} free, and the run needs at least {least}: checkpoints of {each} each, of which "
            f"checkpointing.ft_keep_latest_k={config.ft_keep_latest_k} and keep_top_k={config.keep_top_k} are kept and "
            f"one more is written, and a model of {model}. "
            f"Free some space, keep fewer checkpoints, or choose a run_dir on another disk"
        )


def describe_space(folder: Path) -> str:
    """Return how much space is free, for the message of a full disk."""
    try:
        return f"{format_value(shutil.disk_usage(folder).free, 'bytes')} are free in {folder}"
    except OSError as error:
        return f"the free space of {folder} is unknown: {error}"


@contextmanager
def claimed(run: RunDirectory, *, new: bool = False) -> Iterator[None]:
    """Hold the lock on a run directory during the block: two processes would write into one log.

    Args:
        run: the run's directory.
        new: whether the folder must be empty except for the lock.

    Raises:
        Refusal: another process holds the lock; the message names its machine and process id. Or another run has
            written to a new run's folder since it was found empty.
    """
    path = run.path / CLAIM_FILE
    with path.open("a+", encoding="utf-8") as file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = path.read_text(encoding="utf-8") or "a process that has just started"
            raise Refusal(f"{run.path} is in use by {holder}; stop it first") from error
        except OSError:
            locked = False  # a file system without locks, such as some network mounts
        try:
            if locked:
                file.truncate(0)
                file.write(f"process {os.getpid()} of {socket.gethostname()}")
                file.flush()
            if new and (names := sorted(entry.name for entry in run.path.iterdir() if entry.name != CLAIM_FILE)):
                raise Refusal(
                    f"{run.path} has just been filled by another run (it holds {', '.join(names[:3])}): two were "
                    f"started at the same time; choose another run_dir"
                )
            yield
        finally:
            if locked:
                path.unlink(missing_ok=True)
