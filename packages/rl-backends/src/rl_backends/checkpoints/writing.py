"""Write a checkpoint: whole or not at all, at once or while training goes on.

Knows ranks, threads and names of folders; what is in the files is the affair of `storage`, which tensors there are that
of the backend. A save, in order: the save before it is awaited; all ranks agree on what to write; rank 0 makes a folder
beside the target; each rank writes its file there; rank 0 marks the folder and gives it its name.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from rl_backends.checkpoints.flat_boxes import FlatBox
from rl_backends.checkpoints.manifest import MARKER
from rl_backends.checkpoints.pieces import Piece, this_rank
from rl_backends.checkpoints.planners import PieceSavePlanner
from rl_backends.checkpoints.storage import CheckpointWriter, Contents
from rl_backends.checkpoints.together import on_all, on_first, told
from rl_backends.errors import CheckpointError
from rl_backends.rank_agreement import gather_text, host_group

__all__ = ["CheckpointWrite", "as_json", "idle_group", "unfinished_name", "write_checkpoint"]


class CheckpointWrite:
    """A save that has been asked for; on disk when `wait` returns."""

    def __init__(self, folder: Path, future: "Future[Any]", *, waited_s: float) -> None:
        self.folder = folder
        """What will be the checkpoint."""
        self.waited_s = waited_s
        """Seconds that this save first waited for the one before it."""
        self._future = future
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete; on every rank, and as often as you like.

        Raises:
            CheckpointError: it could not be written. What was complete before still is.
        """
        error = self._error()
        self._told = True
        if error is not None:
            raise error

    def _error(self) -> CheckpointError | None:
        error = self._future.exception()
        if error is None:
            return None
        if this_rank() == 0:  # all have stopped writing, and what they wrote may be what filled the disk
            shutil.rmtree(self.folder.with_name(unfinished_name(self.folder)), ignore_errors=True)
        failure = CheckpointError(
            f"{self.folder} was not written: {told(error)}. Checkpoints that were complete still are; free space or "
            f"mend what is named, and save again"
        )
        failure.__cause__ = error
        return failure

    def unseen_error(self) -> CheckpointError | None:
        """Its failure, if `wait` has not raised it; waits for the end."""
        error = self._error()
        return None if self._told else error


_last: list[CheckpointWrite] = []
"""The asynchronous save of this process that was asked for last."""


def write_checkpoint(
    collect: Callable[[dist.ProcessGroup | None], tuple[dict[str, Piece], Contents]],
    folder: str | Path,
    *,
    asynchronous: bool,
) -> CheckpointWrite:
    """Write what `collect` gives on every rank, which is asked once nothing else is being written.

    Args:
        collect: gives what this rank holds, by name, and what rank 0 writes besides; it may speak over the group.
        folder: the checkpoint to be.
        asynchronous: return when everything is copied to host memory.

    Raises:
        CheckpointError: on every rank: see `save_checkpoint`.
    """
    group, waited_s = _after_the_save_before()
    target = Path(folder).absolute()  # wherever the process may go while it is written
    if asynchronous and group is None:
        raise CheckpointError(
            "asynchronous=True needs a process group: call torch.distributed.init_process_group first"
        )
    pieces, contents = collect(group)
    if len(set(gather_text(str(target), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different folders ({target} here): give all of them the same one")
    unfinished = target.with_name(unfinished_name(target))
    on_first(lambda: _make_room(target, unfinished), group=group)
    writer = CheckpointWriter(unfinished, target, contents)
    if asynchronous:
        future: Future[Any] = _save_later(pieces, writer, group)
        write = CheckpointWrite(target, future, waited_s=waited_s)
        _last[:] = [write]
        return write
    failed = _save_now(pieces, writer, group)
    write = CheckpointWrite(target, failed, waited_s=waited_s)
    write.wait()
    return write


def idle_group() -> dist.ProcessGroup | None:
    """The group over which ranks speak of checkpoints, when no save is using it."""
    for write in _last:
        write.unseen_error()
    return host_group()


def unfinished_name(folder: Path) -> str:
    """Under which a checkpoint is written, beside its target."""
    return f".{folder.name}.checkpoint-unfinished"


class _HostStager(AsyncStager):
    """Copies this rank's shards to host memory before training may change them."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name: _on_host(piece) for name, piece in state_dict.items()}

    def synchronize_staging(self) -> None:
        """The copies are made when `stage` returns."""

    def close(self) -> None:
        """It holds nothing."""


def _after_the_save_before() -> tuple[dist.ProcessGroup | None, float]:
    start = time.perf_counter()
    running = any(not write.done for write in _last)
    group = idle_group()
    waited_s = time.perf_counter() - start if running else 0.0
    errors = [error for write in _last if (error := write.unseen_error()) is not None]
    _last.clear()

    def raise_it() -> None:
        if errors:
            raise errors[0]

    on_all(raise_it, group=group)
    return group, waited_s


def as_json(what: str, value: Any, *, exact: bool = False) -> Any:
    """A copy of a value as JSON gives it back, which the caller cannot change while it is written.

    exact: refuse what would not come back as it is.

    Raises:
        CheckpointError: JSON cannot hold it.
    """
    try:
        again = json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} cannot be written as JSON: {error}; give numbers, text, lists and dicts"
        ) from error
    if exact and again != value:
        raise CheckpointError(
            f"{what} would not come back from JSON as it is: give lists for tuples, text for keys, and no NaN"
        )
    return again


def _make_room(target: Path, unfinished: Path) -> None:
    """Remove what killed saves left, and make the folder to write in."""
    if target.is_symlink():
        raise CheckpointError(f"{target} is a symbolic link, which a folder cannot take the place of: choose another")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what = "a complete checkpoint" if (target / MARKER).is_file() else "something else"
        raise CheckpointError(f"{target} is there already, {what}; nothing is overwritten: choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(unfinished_name(Path("*"))):
            shutil.rmtree(leftover)
        unfinished.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be written to: {error}") from error


@torch.no_grad()
def _save_later(pieces: dict[str, Piece], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> "Future[Any]":
    future = async_save(
        pieces,
        storage_writer=writer,
        planner=PieceSavePlanner(),
        process_group=group,
        async_stager=_HostStager(),
    )
    assert isinstance(future, Future)
    return future


def _save_now(pieces: dict[str, Piece], writer: CheckpointWriter, group: dist.ProcessGroup | None) -> "Future[Any]":
    """A future that has ended already, so that both ways to save fail in one way."""
    ended: Future[Any] = Future()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is as it should be
            ended.set_result(save(pieces, storage_writer=writer, planner=PieceSavePlanner(), process_group=group))
    except (CheckpointException, RuntimeError, OSError) as error:
        ended.set_exception(error)
    return ended


def _on_host(piece: Piece) -> Piece:
    """A copy of what the boxes hold; their memory is often that of other names too, as of q where k and v are fused."""
    sizes = [math.prod(box.sizes) for box in piece.boxes]
    if sum(sizes) == piece.local.numel():
        return replace(piece, local=piece.local.to("cpu", copy=True))
    copy = torch.empty(sum(sizes), dtype=piece.local.dtype)
    boxes: list[FlatBox] = []
    start = 0
    for box, size in zip(piece.boxes, sizes, strict=True):
        boxes.append(FlatBox(offsets=box.offsets, sizes=box.sizes, start=start))
        boxes[-1].of_local(copy).copy_(box.of_local(piece.local))
        start += size
    return replace(piece, local=copy, boxes=tuple(boxes))
