"""Write checkpoints: when one is due, what it contains, and which ones are kept.

`CheckpointManager` holds the checkpoints of a run while it trains. `load_progress` reads one back, and `truncate_logs`
cuts the logs of a resumed run back to it, since a killed run has logged steps that are trained again.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_backends.checkpoints.folders import atomic_folder, unfinished_name
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints.folders import (
    POLICY,
    STAGE_START,
    Checkpoint,
    CheckpointError,
    folder_name,
    list_checkpoints,
    mark_complete,
    read_checkpoint,
    root_of,
    unfinished_of,
)
from rl_launcher.checkpoints.nested_state import pack, unpack
from rl_launcher.checkpoints.progress import NUMBER_FIELDS, Progress, data_digest
from rl_launcher.schema import CheckpointingConfig
from rl_observe import RunDirectory, read_metrics

NUMBERS, TENSORS = "progress.json", "progress.safetensors"
LOGS = ("metrics.jsonl", "samples.jsonl", "spans.jsonl", "refits.jsonl")
"""The files that a resumed run appends to. `events.jsonl` is never cut, since the events did happen."""
DISCARDED = ".discarded"


class CheckpointManager:
    """The checkpoints of one run, while it trains.

    `started` is `time.perf_counter` when this process started on the run; `progress.wall_s` counts the run's seconds up
    to `counted_until` of the same clock, None meaning `started`.
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
        self.run, self._config, self._parts, self.progress = run, config, parts, progress
        self._earlier_s, self._started = progress.wall_s, started
        self._counted_until = started if counted_until is None else counted_until
        self._last_save = self._last_step = time.perf_counter()
        self._longest_step_s = 0.0

    def after_step(self, *, before: int) -> "Due":
        """Decide what to do now; `before` is the number of steps over all stages before this one."""
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
        """Save now, and then remove the checkpoints that are no longer kept. A step that is saved already stays.

        Raises:
            OSError: it cannot be written; earlier checkpoints stay complete. The policy's errors are passed on.
        """
        self.count_time()
        folder = root_of(self.run) / folder_name(self.progress.total)
        if not folder.exists():
            _write(self.progress, self._parts, self.run, folder=folder)
        saved = read_checkpoint(folder)
        for old in set(found := list_checkpoints(self.run)) - set(to_keep(found, self._config)):
            _remove(old)
        self._last_save = self._last_step = time.perf_counter()
        return saved

    def save_stage_start(self) -> None:
        """Save the weights with which a stage starts, for a stage whose loss compares with them."""
        with atomic_folder(self.stage_start.parent) as unfinished:
            self._parts.policy.save_checkpoint(unfinished / POLICY)
            mark_complete(unfinished, {})

    def start_folder(self, name: str) -> Path:
        """The folder in which a model beside the policy is given the policy's weights; it is removed again."""
        return root_of(self.run) / f"start_{name}"

    @property
    def stage_start(self) -> Path:
        """The folder that `save_stage_start` wrote the weights to."""
        return root_of(self.run) / STAGE_START / POLICY

    def count_time(self) -> float:
        """Return the seconds that the run has taken over all processes, and note them for the next checkpoint."""
        self.progress.wall_s = self._earlier_s + time.perf_counter() - self._counted_until
        return self.progress.wall_s

    def finish(self) -> None:
        """Clean up after a run that completed: the stage's first weights, unfinished folders, unwanted checkpoints."""
        shutil.rmtree(self.stage_start.parent, ignore_errors=True)
        for path in unfinished_of(self.run):
            shutil.rmtree(path, ignore_errors=True)
        # Without a save period, checkpoints are only written when a run stops early.
        if self._config.save_period <= 0 and self._config.save_period_s is None:
            shutil.rmtree(root_of(self.run), ignore_errors=True)


def _remove(checkpoint: Checkpoint) -> None:
    # Renamed first: a kill in the middle leaves no half-removed folder with a checkpoint's name.
    doomed = checkpoint.folder.with_name(unfinished_name(checkpoint.folder))
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.folder.rename(doomed)
    shutil.rmtree(doomed)


# ---- When to save, and what to keep: pure functions.


class Due(NamedTuple):
    """What to do after a step."""

    save: bool
    end: bool
    """Save and end the run, because `checkpoint_must_save_by` would pass during the next step."""


def due(
    config: CheckpointingConfig, *, before: int, after: int, since_save_s: float, elapsed_s: float, step_s: float
) -> Due:
    """Decide what to do after a batch.

    Args:
        config: the recipe's `checkpointing`.
        before: steps over all stages before the batch.
        after: steps over all stages after it; one batch may take several.
        since_save_s: seconds since the last checkpoint, or since the process started.
        elapsed_s: seconds since the process started.
        step_s: seconds of the longest step so far; the next one may take as long.
    """
    period, limit = config.save_period, config.must_save_after_s
    counted = period > 0 and before // period < after // period
    timed = config.save_period_s is not None and since_save_s >= config.save_period_s
    end = limit is not None and elapsed_s + step_s >= limit
    return Due(save=counted or timed or end, end=end)


def to_keep(checkpoints: Sequence[Checkpoint], config: CheckpointingConfig) -> list[Checkpoint]:
    """Return the newest `ft_keep_latest_k` and the best `keep_top_k`, oldest first.

    Of two with equal metrics the later counts as better. One without a metric can only be kept as one of the newest.
    """
    by_age = sorted(checkpoints, key=lambda each: each.total)
    sign = 1.0 if config.higher_is_better else -1.0
    measured = [(sign * each.metric, each.total) for each in by_age if each.metric is not None]
    best = sorted(measured, reverse=True)[: config.keep_top_k]
    kept = {each.total for each in by_age[-config.ft_keep_latest_k :]} | {total for _, total in best}
    return [each for each in by_age if each.total in kept]


# ---- Writing and reading.


def save_mid_step(progress: Progress, parts: Parts, run: RunDirectory) -> Path:
    """Write the weights of a run that failed within a batch. They can be exported, but not resumed from."""
    folder = root_of(run) / folder_name(progress.total + 1).replace("step", "in_step")
    _write(progress, parts, run, folder=folder)
    return folder


def _write(progress: Progress, parts: Parts, run: RunDirectory, *, folder: Path) -> None:
    progress.data = progress.data or data_digest(parts)  # a resumed run has compared it already
    progress.cwd = str(Path.cwd())
    for name in LOGS:
        path = run.path / name
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # the length below must be on disk before the checkpoint that records it
            progress.logs[name] = path.stat().st_size
    state, tensors = pack(progress.keep_state() if progress.keep_state else None, prefix="state")
    with atomic_folder(folder) as unfinished:
        parts.policy.save_checkpoint(unfinished / POLICY)
        for name, model in parts.companions.trained.items():
            model.save_checkpoint(unfinished / name)
        kept = {f"kept/{name}": value.contiguous() for name, value in progress.tensors.items()}
        save_file({**kept, **tensors}, unfinished / TENSORS)
        (unfinished / NUMBERS).write_text(json.dumps({**progress.numbers, "state": state}), encoding="utf-8")
        names = (each.name for each in fields(Checkpoint) if each.name != "folder")
        mark_complete(unfinished, {name: getattr(progress, name) for name in names})


def load_progress(checkpoint: Checkpoint) -> Progress:
    """Read the progress from a checkpoint.

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
            f"{folder / NUMBERS} must have {', '.join(NUMBER_FIELDS)}; it has {', '.join(numbers)}: resume with the "
            f"release of rl-launcher that wrote it"
        )
    kept = {name.removeprefix("kept/"): tensor for name, tensor in tensors.items() if name.startswith("kept/")}
    return Progress(**numbers, tensors=kept, state=state, folder=folder)


# ---- The logs of a resumed run.


def truncate_logs(run: RunDirectory, *, logs: Mapping[str, int]) -> list[str]:
    """Cut every log file back to the bytes in `logs`, and return messages about what was cut.

    What is cut off is appended to `NAME.discarded`. TensorBoard's files cannot be cut, so they are written again from
    what remains of `metrics.jsonl`.
    """
    cut = {name: lines for name in LOGS if (lines := _cut(run.path / name, logs.get(name, 0)))}
    if run.metrics.name in cut and run.tensorboard.is_dir():
        _rewrite_tensorboard(run)
    return [f"{lines} lines of {name} after it are in {name}{DISCARDED}" for name, lines in cut.items()]


def _cut(path: Path, num_bytes: int) -> int:
    """Cut a file to its first `num_bytes` bytes, and return the number of lines that were cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        file.seek(num_bytes)
        rest = file.read()
        if not rest:
            return 0
        # The copy is on disk before the original is cut, so that a kill in between loses nothing.
        with path.with_name(path.name + DISCARDED).open("ab") as discarded:
            discarded.write(rest if rest.endswith(b"\n") else rest + b"\n")
            discarded.flush()
            os.fsync(discarded.fileno())
        file.truncate(num_bytes)
        os.fsync(file.fileno())
    return rest.count(b"\n") + (not rest.endswith(b"\n"))


def _rewrite_tensorboard(run: RunDirectory) -> None:
    # Imported here because TensorBoard takes a second to import, and few runs need it.
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
