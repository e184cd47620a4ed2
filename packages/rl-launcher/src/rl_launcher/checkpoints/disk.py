"""The run directory on disk: free space, the lock that one process holds, and whether all nodes share the folder."""

import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rl_launcher.errors import Refusal
from rl_launcher.schema import CheckpointingConfig
from rl_observe import RunDirectory

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
    """Refuse before the first step a run whose checkpoints would not fit on the disk.

    Args:
        folder: an existing folder on the run's disk.
        checkpoint_bytes: the least size of one checkpoint.
        model_bytes: the size of the trained model.
        config: how many checkpoints are kept.
        free_bytes: the free space; None reads the disk.

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
        raise DiskSpaceError(
            f"{folder} has {_in_words(free)} free, and the run needs at least {_in_words(needed)}: checkpoints of "
            f"{_in_words(checkpoint_bytes)} each, of which checkpointing.ft_keep_latest_k={config.ft_keep_latest_k} "
            f"and keep_top_k={config.keep_top_k} are kept and one more is written, and a model of "
            f"{_in_words(model_bytes)}. "
            f"Free some space, keep fewer checkpoints, or choose a run_dir on another disk"
        )


def describe_space(folder: Path) -> str:
    """Return how much space is free, for the message of a full disk."""
    try:
        return f"{_in_words(shutil.disk_usage(folder).free)} are free in {folder}"
    except OSError as error:
        return f"the free space of {folder} is unknown: {error}"


def _in_words(num_bytes: int) -> str:
    value, units = float(num_bytes), ["bytes", "KB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


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


class SharedFolder:
    """Prove that all ranks see the same folder, by a file that lies in it during the block.

    All ranks write their shards into one checkpoint, so without a common folder no node would have a complete one.

    with SharedFolder(folder) as probe:
        probe.require({"rank 1 on node b": call_rank_1(sees, probe.path, probe.token)})
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.token = secrets.token_hex(16)
        """The content of the file: a file of the same name on another disk has another one."""
        self.path = str(self._folder / f".shared-{self.token[:8]}")
        """The file."""

    def require(self, seen: Mapping[str, bool]) -> None:
        """Refuse a folder that not every rank sees; `seen` has the result of `sees` by rank.

        Raises:
            Refusal: with the ranks that do not see it, and the remedy.
        """
        if blind := [rank for rank, sees_it in seen.items() if not sees_it]:
            raise Refusal(
                f"{self._folder} is not the same folder for {', '.join(blind)}: all ranks write checkpoints, and read "
                f"them when the run is resumed; set run_dir to a folder that every node mounts at the same path"
            )

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        Path(self.path).write_text(self.token, encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Path(self.path).unlink(missing_ok=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def sees(path: str, token: str) -> bool:
    """Return whether the calling process sees the file of a `SharedFolder`; to be called on every rank."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:  # absent or unreadable
        return False
