"""When a checkpoint is due, what it contains, which ones are kept, and writing it.

A killed process has logged steps of which nothing else is left; they are taken again, and no step is logged twice.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_launcher.checkpoints.folders import (
    POLICY,
    STAGE_START,
    Checkpoint,
    CheckpointError,
    appearing,
    folder_name,
    list_checkpoints,
    mark_complete,
    read_checkpoint,
    root_of,
    unfinished_name,
    unfinished_of,
)
from rl_launcher.checkpoints.progress import NUMBER_FIELDS, Progress, data_digest, pack, unpack
from rl_launcher.run_parts import Parts
from rl_launcher.schema import CheckpointingConfig
from rl_observe import RunDirectory, read_metrics

__all__ = [
    "Due",
    "Keeper",
    "Measured",
    "cut_history",
    "due",
    "load_progress",
    "save_beginning",
    "save_in_a_step",
    "save_progress",
    "stage_start_of",
    "to_keep",
]

NUMBERS, TENSORS = "progress.json", "progress.safetensors"
LOGS = ("metrics.jsonl", "samples.jsonl", "spans.jsonl", "refits.jsonl")
"""Files of a run directory that a resumed run appends to; `events.jsonl` is kept whole, since it all did happen."""


def save_progress(progress: Progress, parts: Parts, run: RunDirectory) -> Checkpoint:
    """Write a checkpoint to go on from; one that is there already is this one, and stays.

    Raises:
        OSError: it cannot be written; every earlier checkpoint is whole. The policy's errors as they are.
    """
    folder = root_of(run) / folder_name(progress.total)
    if folder.exists():
        return read_checkpoint(folder)
    _write(progress, parts, run, folder=folder)
    return read_checkpoint(folder)


def save_in_a_step(progress: Progress, parts: Parts, run: RunDirectory) -> Path:
    """Write the weights of a run that failed in the middle of a batch: to look at, to export, not to go on from."""
    folder = root_of(run) / folder_name(progress.total + 1).replace("step", "in_step")
    _write(progress, parts, run, folder=folder)
    return folder


def _write(progress: Progress, parts: Parts, run: RunDirectory, *, folder: Path) -> None:
    progress.data = progress.data or data_digest(parts)  # of a run that goes on, it has been checked
    progress.cwd = str(Path.cwd())
    progress.logs = _sizes(run)
    state, tensors = pack(progress.keep_state() if progress.keep_state else None, prefix="state")
    with appearing(folder) as unfinished:
        parts.policy.save_checkpoint(unfinished / POLICY)
        save_file(
            {**{f"kept/{name}": value.contiguous() for name, value in progress.tensors.items()}, **tensors},
            unfinished / TENSORS,
        )
        (unfinished / NUMBERS).write_text(json.dumps({**progress.numbers, "state": state}), encoding="utf-8")
        names = (each.name for each in fields(Checkpoint) if each.name != "folder")
        mark_complete(unfinished, {name: getattr(progress, name) for name in names})


def save_beginning(parts: Parts, run: RunDirectory) -> None:
    """Keep the weights that a stage begins with, for a run that is held to them and may have to go on."""
    with appearing(stage_start_of(run)) as unfinished:
        parts.policy.save_checkpoint(unfinished / POLICY)
        mark_complete(unfinished, {})


def stage_start_of(run: RunDirectory) -> Path:
    """Where `save_beginning` writes to."""
    return root_of(run) / STAGE_START


def load_progress(checkpoint: Checkpoint) -> Progress:
    """Where a checkpoint stands.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = checkpoint.folder
    try:
        tensors = load_file(folder / TENSORS)
        numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
        state = unpack(numbers.pop("state", None), tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be resumed from: {error}") from error
    if set(numbers) != set(NUMBER_FIELDS):
        raise CheckpointError(
            f"{folder / NUMBERS} must have {', '.join(NUMBER_FIELDS)}; it has {', '.join(numbers)}: go on with the "
            f"release of rl-launcher that wrote it"
        )
    kept = {name.removeprefix("kept/"): tensor for name, tensor in tensors.items() if name.startswith("kept/")}
    return Progress(**numbers, tensors=kept, state=state, folder=folder)


def _sizes(run: RunDirectory) -> dict[str, int]:
    """How long the log is, once all of it is on disk."""
    sizes = {}
    for name in LOGS:
        path = run.path / name
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[name] = path.stat().st_size
    return sizes


class Measured(Protocol):
    """What is known of a checkpoint."""

    @property
    def total(self) -> int:
        """Its place in the run."""

    @property
    def metric(self) -> float | None:
        """How good it is; None where nothing was measured before it."""


MeasuredT = TypeVar("MeasuredT", bound=Measured)


def to_keep(checkpoints: Sequence[MeasuredT], config: CheckpointingConfig) -> list[MeasuredT]:
    """The newest `ft_keep_latest_k` and the best `keep_top_k`, oldest first; of equals, the later is the better.

    What was never measured is kept for its age alone.
    """
    by_age = sorted(checkpoints, key=lambda each: each.total)
    sign = 1.0 if config.higher_is_better else -1.0
    measured = [(sign * each.metric, each.total, each) for each in by_age if each.metric is not None]
    best = sorted(measured, key=lambda each: each[:2], reverse=True)[: config.keep_top_k]
    kept = {each.total for each in by_age[-config.ft_keep_latest_k :]} | {total for _, total, _ in best}
    return [each for each in by_age if each.total in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to be done after a step."""

    save: bool
    end: bool
    """Save, and end the run: `checkpoint_must_save_by` would pass during the next step."""


def due(
    config: CheckpointingConfig, *, before: int, after: int, since_save_s: float, elapsed_s: float, step_s: float
) -> Due:
    """Decide after a step.

    Args:
        config: of the recipe.
        before: steps over all stages before this one.
        after: and after it; a batch of rollouts may be several at once.
        since_save_s: seconds since the last checkpoint, or since the process started.
        elapsed_s: seconds since the process started.
        step_s: how long the longest step so far took: the next may take as long.
    """
    period, limit = config.save_period, config.must_save_after_s
    counted = period > 0 and before // period < after // period
    timed = config.save_period_s is not None and since_save_s >= config.save_period_s
    end = limit is not None and elapsed_s + step_s >= limit
    return Due(save=counted or timed or end, end=end)


class Keeper:
    """The checkpoints of one run, while it goes on.

    Args:
        run: whose.
        config: when to save, and what to keep.
        parts: what is saved.
        progress: how far the run has come.
        started: of `time.perf_counter`, when this process began with the run.
        counted_until: of the same clock, up to when `progress` has counted its seconds; None: none of this process.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: CheckpointingConfig,
        *,
        parts: Parts,
        progress: Progress,
        started: float,
        counted_until: float | None = None,
    ) -> None:
        self._run, self._config, self._parts, self.progress = run, config, parts, progress
        self._earlier_s, self._started = progress.wall_s, started
        self._counted_until = started if counted_until is None else counted_until
        self._last_save = self._last_step = time.perf_counter()
        self._longest_step_s = 0.0

    def after_step(self, *, before: int) -> Due:
        """What is to be done now, `before` being the steps over all stages before this one."""
        now = time.perf_counter()
        self._longest_step_s, self._last_step = max(self._longest_step_s, now - self._last_step), now
        return due(
            self._config,
            before=before,
            after=self.progress.total,
            since_save_s=now - self._last_save,
            elapsed_s=now - self._started,
            step_s=self._longest_step_s,
        )

    def save(self) -> Checkpoint:
        """Save now, then remove what is no longer kept: never before the new one is whole."""
        self.count_time()
        saved = save_progress(self.progress, self._parts, self._run)
        for old in set(found := list_checkpoints(self._run)) - set(to_keep(found, self._config)):
            _remove(old)
        self._last_save = self._last_step = time.perf_counter()
        return saved

    def keep_beginning(self) -> None:
        """Keep the weights that the stage begins with."""
        save_beginning(self._parts, self._run)

    @property
    def beginning(self) -> Path:
        """Where they are."""
        return stage_start_of(self._run) / POLICY

    def count_time(self) -> float:
        """Seconds that the run has taken over all processes; what a checkpoint remembers."""
        self.progress.wall_s = self._earlier_s + time.perf_counter() - self._counted_until
        return self.progress.wall_s

    def finish(self) -> None:
        """Of a run that has come to its end: remove what only an early end needs, and what kills left."""
        asked = self._config.save_period > 0 or self._config.save_period_s is not None
        shutil.rmtree(stage_start_of(self._run), ignore_errors=True)
        for path in unfinished_of(self._run):
            shutil.rmtree(path, ignore_errors=True)
        root = root_of(self._run)
        if not asked and root.exists():
            shutil.rmtree(root, ignore_errors=True)


def _remove(checkpoint: Checkpoint) -> None:
    # Under another name first, so that a kill half-way leaves no torn one under a good name.
    doomed = checkpoint.folder.with_name(unfinished_name(checkpoint.folder))
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.folder.rename(doomed)
    shutil.rmtree(doomed)


DISCARDED = ".discarded"


def cut_history(run: RunDirectory, *, logs: Mapping[str, int]) -> list[str]:
    """Cut every file of the log to the bytes that it had; return what was done, in words, [] if nothing was.

    What is cut off is appended to `NAME.discarded`. TensorBoard's files are written anew from what is left of
    `metrics.jsonl`, since nothing can be cut out of them.
    """
    cut = {name: lines for name in LOGS if (lines := _cut(run.path / name, logs.get(name, 0)))}
    if run.metrics.name in cut and run.tensorboard.is_dir():
        _rewrite_tensorboard(run)
    return [f"{lines} lines of {name} after it are in {name}{DISCARDED}" for name, lines in cut.items()]


def _cut(path: Path, num_bytes: int) -> int:
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        file.seek(num_bytes)
        rest = file.read()
        if not rest:
            return 0
        with path.with_name(path.name + DISCARDED).open("ab") as discarded:
            discarded.write(rest if rest.endswith(b"\n") else rest + b"\n")
            discarded.flush()
            os.fsync(discarded.fileno())
        file.truncate(num_bytes)
        os.fsync(file.fileno())
    return rest.count(b"\n") + (not rest.endswith(b"\n"))


def _rewrite_tensorboard(run: RunDirectory) -> None:
    # TensorBoard takes a second to import, and few runs come here.
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import FileWriter

    files = [path for path in run.tensorboard.iterdir() if ".tfevents." in path.name]
    began = min((path.stat().st_ctime for path in files), default=0.0)
    for path in files:
        path.rename(path.with_name(DISCARDED + "-" + path.name.replace("tfevents", "discarded")))
    writer = FileWriter(str(run.tensorboard))
    for row in read_metrics(run):
        stage, step, time_s = row["stage"], int(str(row["step"])), float(str(row["time_s"]))
        values = [
            Summary.Value(tag=f"{stage}/{name}", simple_value=value)
            for name, value in row.items()
            if name not in {"stage", "step", "time_s"} and isinstance(value, int | float)
        ]
        writer.add_summary(Summary(value=values), step, walltime=began + time_s)
    writer.close()
