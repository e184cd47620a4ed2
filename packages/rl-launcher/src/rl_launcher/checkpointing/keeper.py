"""Saves a run when it is due, and removes what is no longer kept. Decides by the rules of `retention`."""

import shutil
import time
from pathlib import Path

from rl_launcher.checkpointing.files import unfinished_name
from rl_launcher.checkpointing.folders import POLICY, Checkpoint, list_checkpoints, root_of, unfinished_of
from rl_launcher.checkpointing.progress import Progress
from rl_launcher.checkpointing.retention import Due, due, to_keep
from rl_launcher.checkpointing.saving import save_beginning, save_progress, stage_start_of
from rl_launcher.observe import RunDirectory
from rl_launcher.parts import Parts
from rl_launcher.recipe_schema import CheckpointingConfig

__all__ = ["Keeper"]


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
