"""Save a checkpoint, either complete or not at all, at once or while training goes on; find and remove old ones.

The order of a save: the previous save is awaited; all ranks agree on what to write; rank 0 makes a folder beside the
target; each rank writes its file there; rank 0 writes the marker and renames the folder.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.checkpoints.contents import CheckpointContents, TorchContents
from rl_backends.checkpoints.optimizer_state import CheckpointedOptimizers
from rl_backends.checkpoints.shards import rng_shards, this_rank
from rl_backends.checkpoints.storage import MARKER, Manifest, StagingBuffers, read_manifest, write_boxes
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import gather_text, host_group, on_every_rank, on_rank_0


@contextmanager
def other_ranks_failures() -> Iterator[None]:
    """Raise what another rank failed with as a CheckpointError."""
    try:
        yield
    except RankError as error:
        raise CheckpointError(str(error)) from error


def save_checkpoint(
    model: nn.Module,
    optimizers: CheckpointedOptimizers | None,
    folder: str | Path,
    *,
    version: int,
    asynchronous: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> "CheckpointWrite":
    """Write weights, optimizers, schedule and random-number generators into a new folder; every rank must call it.

    Args:
        model: sharded by rl_parallel_plans, or plain.
        optimizers: None saves the weights alone.
        folder: the checkpoint to be written; its parent belongs to this run, which removes what killed saves left.
        version: optimizer steps that the weights have seen.
        asynchronous: return when the copies to host memory are made or queued, and write while training goes on. The
            host needs memory for this rank's shards of weights and moments; it is kept for the next save, pinned if
            the shards are on a GPU, until `release_staging_buffers` or the backend's `close`.
        extra: what else belongs to the run, as JSON.

    Returns:
        The write; already complete unless `asynchronous`.

    Raises:
        CheckpointError: on every rank: it cannot be written, something is there already, or the previous asynchronous
            save failed and nobody has been told; nothing was saved then.
    """
    contents = TorchContents(model, optimizers)
    return write_checkpoint(contents, folder, version=version, asynchronous=asynchronous, extra=extra)


class CheckpointWrite:
    """A save that was started; the checkpoint is on disk when `wait` returns."""

    def __init__(self, folder: Path, future: "Future[Any]") -> None:
        self.folder = folder
        """Where the checkpoint will be."""
        self._future = future
        self._raised = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is complete; on every rank, any number of times.

        Raises:
            CheckpointError: it could not be written. Checkpoints that were complete before still are.
        """
        error = self._error()
        self._raised = True
        if error is not None:
            raise error

    def unseen_error(self) -> CheckpointError | None:
        """Wait for the end; return the failure, unless `wait` has raised it already."""
        error = self._error()
        return None if self._raised else error

    def _error(self) -> CheckpointError | None:
        error = self._future.exception()
        if error is None:
            return None
        if this_rank() == 0:  # all ranks have stopped writing, and what they wrote may be what filled the disk
            shutil.rmtree(self.folder.with_name(unfinished_name(self.folder)), ignore_errors=True)
        what = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        failure = CheckpointError(
            f"{self.folder} was not written: {what}. Checkpoints that were complete still are; free space or mend what "
            f"is named, and save again"
        )
        failure.__cause__ = error
        return failure


_last: list[CheckpointWrite] = []
"""The last asynchronous save of this process."""
_buffers = StagingBuffers()
"""Host memory of asynchronous saves, kept from one to the next."""


def release_staging_buffers() -> None:
    """Free the host memory that asynchronous saves keep for the next one, when the last one has ended."""
    global _buffers  # noqa: PLW0603 - a process saves one checkpoint at a time
    for write in _last:
        write.unseen_error()
    _buffers = StagingBuffers()


def idle_group() -> dist.ProcessGroup | None:
    """The process group over which checkpoints are coordinated, when no save is using it any more."""
    for write in _last:
        write.unseen_error()
    return host_group()


def unfinished_name(folder: Path) -> str:
    """The name under which a checkpoint is written, beside its target."""
    return f".{folder.name}.checkpoint-unfinished"


@other_ranks_failures()
def write_checkpoint(
    contents: CheckpointContents,
    folder: str | Path,
    *,
    version: int,
    asynchronous: bool,
    extra: Mapping[str, Any] | None,
    frozen: Mapping[str, int] | None = None,
) -> CheckpointWrite:
    """As `save_checkpoint`, of what any backend has laid out.

    frozen: weights that are left out, since they never change: their digests by name, as `tensor_digests` returns them.
    """
    group = idle_group()
    unseen = [error for write in _last if (error := write.unseen_error()) is not None]
    _last.clear()

    def raise_unseen() -> None:
        if unseen:
            raise unseen[0]

    on_every_rank(raise_unseen, group=group)
    target = Path(folder).absolute()  # also if the process changes its directory while it is written
    if asynchronous and group is None:
        raise CheckpointError(
            "asynchronous=True needs a process group: call torch.distributed.init_process_group first"
        )
    names, described = contents.described_by_all(optimizers=True, group=group)
    left_out, optimizers = dict(frozen or {}), contents.optimizers
    shards = on_every_rank(lambda: rng_shards(contents.device) + contents.shards(left_out=left_out), group=group)

    def state_here() -> dict[str, Any]:
        return {
            "extra": as_json("extra", dict(extra or {}), exact=True),
            "optimizers": as_json("the optimizers", described),
            "schedule": None if optimizers is None else as_json("the schedule's state", optimizers.schedule_state()),
            "frozen": left_out,
        }

    state = on_every_rank(state_here, group=group)
    if len(set(gather_text(str(target), group=group))) > 1:
        raise CheckpointError(f"the ranks were given different folders ({target} here): give all of them the same one")
    unfinished = target.with_name(unfinished_name(target))
    on_rank_0(lambda: _make_room(target, unfinished), group=group)
    if asynchronous or any(not shard.local.is_cpu for shard in shards):
        shards = _buffers.stage(shards)
    manifest = Manifest(version=version, mesh=contents.mesh, model=names)
    action = partial(
        write_boxes, unfinished, target, shards, manifest=manifest, state=state, buffers=_buffers, group=group
    )
    if asynchronous:
        thread = ThreadPoolExecutor(1, "checkpoint")
        _last.append(CheckpointWrite(target, thread.submit(action)))
        thread.shutdown(wait=False)
        return _last[0]
    future: Future[None] = Future()  # that has ended already, so that both ways to save fail in the same way
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001 - raised by `wait`
        future.set_exception(error)
    write = CheckpointWrite(target, future)
    write.wait()
    return write


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


def as_json(what: str, value: Any, *, exact: bool = False) -> Any:
    """A copy of a value as JSON returns it, which the caller cannot change while it is written.

    exact: refuse values that would come back changed.
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


# ---- Which checkpoints a folder holds, and which of them may be removed.


def find_latest(parent: str | Path) -> Path | None:
    """The checkpoint in `parent` that was completed last, or None if there is none.

    The order is that of the time of writing, not of the versions: a run that went back to step 5 continues from its
    own step 6. Folders without a marker do not count; a marker that cannot be read is an error and never skipped,
    since that checkpoint might be the newest. Not a collective: let one rank ask, or all after `CheckpointWrite.wait`.

    Raises:
        CheckpointError: a marker is damaged or of an unknown format, so that the newest one is not known.
    """
    found = _complete(Path(parent))
    return found[-1] if found else None


@other_ranks_failures()
def prune(parent: str | Path, *, keep: int) -> list[Path]:
    """Remove all complete checkpoints in `parent` but the `keep` newest; every rank must call it.

    A checkpoint is renamed before it is removed, so that a kill half-way leaves no torn one.

    Returns:
        What was removed.

    Raises:
        ValueError: keep < 1.
        CheckpointError: on every rank: a marker is damaged, or a folder cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be >= 1, or nothing is left to resume from")
    group = idle_group()
    old = on_every_rank(lambda: _complete(Path(parent))[:-keep], group=group)

    def remove() -> None:
        for folder in old:
            doomed = folder.with_name(unfinished_name(folder))
            try:
                folder.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be removed: {error}") from error

    on_rank_0(remove, group=group)
    return old


def _complete(parent: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found: list[tuple[int, int, str, Path]] = []
    for marker in parent.glob(f"*/{MARKER}"):
        folder = marker.parent
        if folder.name.startswith("."):
            continue
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Which checkpoint of {parent} is the newest cannot be told: move {folder.name} elsewhere"
            ) from error
        found.append((manifest.written_at_ns, manifest.version, folder.name, folder))
    return [folder for *_, folder in sorted(found)]
