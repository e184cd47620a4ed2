"""Disk space, whether a folder is shared by all nodes, and the lock on a run directory.

Every rank writes its shards there, and one process gives the folder its name: where the nodes have no folder in common,
a checkpoint would be whole on none of them.

Two that resume one run would write into one log and remove each other's checkpoints.
"""

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

__all__ = [
    "STATE_PER_WEIGHT",
    "DiskSpaceError",
    "SharedFolder",
    "bytes_needed",
    "check_space",
    "claimed",
    "describe_space",
    "sees",
]

STATE_PER_WEIGHT = 3
"""A checkpoint has at least the weights and the two moments of AdamW, in the dtype of the weights."""


class DiskSpaceError(Refusal):
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


class SharedFolder:
    """A context in which one file lies in `folder` for the others to find.

    with SharedFolder(folder) as probe:
        probe.require({"rank 1 on node b": ask_rank_1(sees, probe.path, probe.token)})
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.token = secrets.token_hex(16)
        """What the file says: one of the same name on another disk says something else."""
        self.path = str(self._folder / f".shared-{self.token[:8]}")
        """Of the file."""

    def require(self, seen: Mapping[str, bool]) -> None:
        """Refuse a folder that somebody does not see.

        Raises:
            Refusal: naming who does not, and what to do.
        """
        if blind := [who for who, sees_it in seen.items() if not sees_it]:
            raise Refusal(
                f"{self._folder} is not the same folder for {', '.join(blind)}: checkpoints are written by all ranks, "
                f"and read by all when the run goes on; set run_dir to a folder that every node mounts at "
                f"the same place"
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
    """Whether the process that calls this sees the file; to be called on every rank."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:  # absent, or not to be read: not seen either way
        return False


NAME = ".claimed"


@contextmanager
def claimed(run: RunDirectory, *, new: bool = False) -> Iterator[None]:
    """Hold the claim in the block.

    Args:
        run: whose.
        new: nothing but the claim may be in its folder.

    Raises:
        Refusal: another process holds it; on which machine, and which, is told. Or a new run's folder was filled
            since it was found empty.
    """
    path = run.path / NAME
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(f"{run.path} is being carried on already, by {_holder(path)}; end that first") from error
        except OSError:  # a file system without locks, as some that are mounted over a network
            _refuse_what_is_there(run, new=new)
            yield
            return
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}")
            file.flush()
            _refuse_what_is_there(run, new=new)
            yield
        finally:
            path.unlink(missing_ok=True)


def _refuse_what_is_there(run: RunDirectory, *, new: bool) -> None:
    if new and (names := sorted(entry.name for entry in run.path.iterdir() if entry.name != NAME)):
        raise Refusal(
            f"{run.path} is the folder of another run since a moment ago (it holds {', '.join(names[:3])}): two were "
            f"started at once; choose another run_dir"
        )


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8") or "a process that has just begun"
