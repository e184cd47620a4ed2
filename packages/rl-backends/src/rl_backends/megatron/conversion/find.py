"""Find the conversion of a model, or make it: one writer over all jobs and nodes, and nothing half done is ever used.

Rank 0 looks, holds the lock and decides, and tells the other ranks; all ranks write, each its own parts. What is
written lies in a hidden folder until every file of it is on disk; then it gets a marker, and then its name. So a kill
at any moment leaves a whole conversion or none, and a hidden folder, which the next writer removes.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir, megatron_checkpoint_dir
from rl_backends.checkpoints.dcp import describe_failure
from rl_backends.errors import CheckpointError, RankError
from rl_backends.loading import ModelSource
from rl_backends.megatron.conversion.content import SourceContent, source_content
from rl_backends.megatron.conversion.conversion import TRACKER, WEIGHTS, Conversion, read_conversion
from rl_backends.megatron.conversion.lock import WriterLock
from rl_backends.megatron.conversion.marker import Marker, read_marker, records, write_marker
from rl_backends.megatron.conversion.place import Place
from rl_backends.megatron.conversion.progress import told_while_writing
from rl_backends.megatron.conversion.space import ELSEWHERE, check_space, told_bytes
from rl_backends.megatron.conversion.tensors import ShardedModel, save_tensors
from rl_backends.rank_agreement import gather_text, on_every_rank, on_rank_0

__all__ = ["find_or_convert"]

Build = Callable[[torch.dtype], ShardedModel]
Say = Callable[[str], None]

LOOK_S = 0.2
TELL_S = 2.0
"""Ranks that wait hear from rank 0 this often, so that no collective of theirs runs into its deadline."""
WAITING_TOLD_S = 30.0
SEEN_S = 10.0
"""How long a network filesystem may take to show a new folder to other nodes."""


def find_or_convert(
    source: ModelSource,
    *,
    build: Build,
    directory: str | Path | None = None,
    timeout_s: float,
    progress: Say | None = None,
) -> Conversion:
    """The conversion of a model: the one that lies there, or a new one; every rank must call it.

    A conversion belongs to a model, a commit and the content of its files. One whose files have changed since is not
    used, nor one that is damaged; the reason is told.

    Args:
        source: the model.
        build: makes this rank's part of the model in a dtype, filled from the source; called on all ranks or on none.
        directory: where conversions lie, for all ranks the same folder; None for `megatron_checkpoint_dir()`.
        timeout_s: seconds to wait for somebody else who converts the same model.
        progress: called on rank 0 with a line of text now and then, also from another thread.

    Raises:
        CheckpointError: no room on disk; it cannot be written; another writer was not done in time; ranks do not see
            one folder.
        ModelError: the model's files are absent or damaged.
        RankError: on the ranks that did not fail.
    """
    say: Say = progress or _say_nothing
    place = _place(source, directory)
    lock = WriterLock(place.target)
    try:
        why = _decide(place, lock, timeout_s=timeout_s, say=say)
        if why:
            _convert(place, source, build, why=why, say=say)
    finally:
        lock.release()
    return on_every_rank(lambda: _seen(place.target, why or "found"))


def _place(source: ModelSource, directory: str | Path | None) -> Place:
    """Rank 0's view of the model's files, on every rank."""

    def look() -> dict[str, Any]:
        folder = (megatron_checkpoint_dir() if directory is None else Path(directory)).expanduser().absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = explain_megatron_checkpoint_dir() if directory is None else str(directory)
            raise CheckpointError(f"conversions cannot lie in {where}: {error}; {ELSEWHERE}") from error
        return {"directory": str(folder), "content": asdict(source_content(source))}

    found = _from_rank_0(look)
    return Place(Path(found["directory"]), SourceContent(**found["content"]))


def _decide(place: Place, lock: WriterLock, *, timeout_s: float, say: Say) -> str:
    """Why to convert, with the lock held on rank 0; or nothing, where there is a conversion."""
    started = time.monotonic()
    told_at = -WAITING_TOLD_S

    def look() -> dict[str, str]:
        nonlocal told_at
        until = time.monotonic() + TELL_S
        while (answer := _look(place, lock)) is None and time.monotonic() < until:
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise CheckpointError(
                    f"{place.target} is being written by {lock.holder()}, and was not done after {timeout_s:g} s: wait "
                    f"for it or end that process, or raise timeout_s"
                )
            if waited > told_at + WAITING_TOLD_S:
                told_at = waited
                say(f"waiting for {lock.holder()}, which converts the same model")
            time.sleep(LOOK_S)
        return {"wait": "yes"} if answer is None else {"why": answer}

    while "wait" in (answer := _from_rank_0(look)):
        pass
    return str(answer["why"])


def _look(place: Place, lock: WriterLock) -> str | None:
    """Why to convert, with the lock taken; empty where there is a conversion; None while somebody else writes."""
    try:
        if place.complete():
            return ""
    except CheckpointError:
        pass  # looked at again under the lock: only its holder may judge
    if not lock.try_acquire():
        return None
    try:
        if place.complete():  # made while this one came to the lock
            lock.release()
            return ""
        outdated = place.outdated()
        return f"the files have changed since {outdated} was made" if outdated else "there was none"
    except CheckpointError as damage:
        place.remove_damaged()
        return f"the one there could not be used: {damage}"


def _convert(place: Place, source: ModelSource, build: Build, *, why: str, say: Say) -> None:
    """Write the conversion and publish it; nothing is left of it where that fails."""
    started = time.monotonic()
    content = place.content

    def begin() -> str:
        if removed := place.remove_leftovers():
            say(f"removed what an interrupted run left: {', '.join(folder.name for folder in removed)}")
        check_space(place.directory, tensor_bytes=content.tensor_bytes)
        say(f"converting {content.model_name} to {place.target}, {told_bytes(content.tensor_bytes)}: {why}")
        return str(place.begin())

    unfinished = Path(_from_rank_0(begin))
    try:
        weights = unfinished / WEIGHTS
        on_rank_0(weights.mkdir)
        on_every_rank(lambda: _wait_until_seen(weights))
        on_rank_0(lambda: say(f"reading {content.files} files of weights"))
        _save(build(getattr(torch, content.dtype)), weights, content, say=say)
        on_rank_0(lambda: _finish(place, unfinished, source, started=started, say=say))
    except BaseException:
        if _is_first_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _save(model: ShardedModel, weights: Path, content: SourceContent, *, say: Say) -> None:
    from rl_backends.megatron.cpu_compat import cpu_compat

    on_rank_0(lambda: say(f"writing {told_bytes(content.tensor_bytes)}"))
    quiet: Say = say if _is_first_rank() else _say_nothing
    try:
        with cpu_compat(), told_while_writing(weights, total_bytes=content.tensor_bytes, say=quiet):
            save_tensors(model, weights)
    except (OSError, RuntimeError, CheckpointException) as error:
        if isinstance(error, RankError):
            raise
        raise CheckpointError(f"{weights.parent} cannot be written: {describe_failure(error)}; {ELSEWHERE}") from error


def _finish(place: Place, unfinished: Path, source: ModelSource, *, started: float, say: Say) -> None:
    """Mark what is written, and give it its name."""
    (unfinished / TRACKER).write_text(WEIGHTS, encoding="utf-8")
    files = records(unfinished)
    content = place.content
    marker = Marker(
        model_name=content.model_name,
        revision=content.revision,
        content=content.key,
        architecture=next(iter(source.config.architectures or [source.config.model_type])),
        vocabulary_size=source.config.vocab_size,
        dtype=content.dtype,
        source_dtype=content.source_dtype,
        num_bytes=sum(record.num_bytes for record in files),
        seconds=round(time.monotonic() - started, 3),
        ranks=dist.get_world_size() if dist.is_initialized() else 1,
        written_at=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        libraries={name: version(name) for name in ("megatron-core", "torch", "transformers")},
        files=files,
    )
    if source_content(source).key != content.key:
        raise CheckpointError(f"the files of {content.model_name} were changed while they were converted; start again")
    write_marker(unfinished, marker)
    place.publish(unfinished)
    say(f"{place.target}: {told_bytes(marker.num_bytes)} in {marker.seconds:.1f} s")


def _seen(target: Path, why: str) -> Conversion:
    """Looked through by rank 0 alone: there may be many ranks, and many files."""
    _wait_until_seen(target)
    if _is_first_rank():
        return read_conversion(target, why=why)
    return Conversion(folder=target, marker=read_marker(target), why=why)


def _wait_until_seen(folder: Path) -> None:
    until = time.monotonic() + SEEN_S
    while not folder.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(
                f"{folder} was made by rank 0 and is not there for this rank: conversions must lie on a filesystem "
                f"that all ranks share"
            )
        time.sleep(LOOK_S)


def _from_rank_0(action: Callable[[], Any]) -> Any:
    """What rank 0 finds, on every rank."""
    found = on_every_rank(lambda: json.dumps(action()) if _is_first_rank() else "")
    return json.loads(gather_text(found)[0])


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _say_nothing(line: str) -> None:
    del line
