"""Carries a run to its end or to where it must end: attempt after attempt, while processes die and restarts are left.

What an attempt does is in `training`; what is said and saved when it ends early, in `ending`.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from rl_launcher.checkpointing import (
    CheckpointError,
    Keeper,
    Progress,
    cut_history,
    find_latest,
    load_progress,
    unfinished_of,
)
from rl_launcher.checkpointing.folders import root_of
from rl_launcher.checkpointing.space import DiskSpaceError
from rl_launcher.ending import conclude, end_early, save_adapter, save_model, weights_lost
from rl_launcher.errors import LauncherError, RestartableError, RunStoppedError
from rl_launcher.garbage import long_lived
from rl_launcher.health import Reporter, Watch, name_of
from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, RunDirectory, RunLog, StageTotal, read_metrics
from rl_launcher.parts import Parts
from rl_launcher.recipe.plain_data import to_plain
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.summary import summarize
from rl_launcher.training import train
from rl_launcher.user_code import changed_code, code_digests

__all__ = ["Resumption", "Run", "find_resumption", "has_begun", "supervise"]

NOT_EXACT = "; which rollout meets which weights depends on clocks (grpo.async_grpo), so the curve is not the same bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run goes on."""

    progress: Progress
    message: str
    """That, in words."""
    name: str = "resumed"
    """Of the condition: `resumed` by a person, or `restarted` by itself."""
    counted_until: float | None = None
    """Of `time.perf_counter`: up to when `progress` has counted the seconds of this process; None for another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What does not change over the attempts of one process."""

    recipe: Recipe
    directory: RunDirectory
    build: Callable[[Recipe], Parts]
    """Makes the parts, for a first attempt or another."""
    started: float
    """Of `time.perf_counter`."""
    resumed: Resumption | None = None
    """What the first attempt goes on from."""


def find_resumption(directory: RunDirectory) -> Resumption:
    """Where a run would go on: at its newest checkpoint, or where a kill left none, at its beginning.

    Raises:
        LauncherError: it has finished, a checkpoint is damaged, or it failed in the middle of a batch and nothing
            earlier was saved.
    """
    if _finished(directory):
        raise LauncherError(f"{directory.path} has nothing to resume: it has finished")
    latest = find_latest(directory)
    torn = [f"{path.name} is torn, and was not read" for path in unfinished_of(directory)]
    if latest is not None:
        progress = load_progress(latest)
        message = f"goes on after {latest.describe()}, from {latest.folder.name}"
    elif halves := sorted(root_of(directory).glob("in_step_*")):
        raise CheckpointError(
            f"{directory.path} has nothing to resume: it failed in the middle of a batch of rollouts, before its first "
            f"checkpoint; the weights of that moment are in {halves[-1]}. Start from them: rl-launcher export "
            f"{halves[-1]} FOLDER, then policy.model_name=FOLDER sft=null run_dir=<another>"
        )
    else:
        progress, message = Progress(), "begins anew, since no checkpoint was whole"
    return Resumption(progress=progress, message="; ".join([message, *torn]))


def _finished(directory: RunDirectory) -> bool:
    """Whether there is a model; one of a run that was killed before it told of that is made again from a checkpoint."""
    if not directory.model.is_dir():
        return False
    try:
        told = not json.loads(directory.summary.read_text(encoding="utf-8"))["interrupted"]
    except (OSError, ValueError, KeyError):  # killed while it wrote, or before
        told = False
    return told or find_latest(directory) is None


def has_begun(directory: RunDirectory) -> bool:
    """Whether a run has logged or saved anything that would be lost with its folder."""
    return bool(read_metrics(directory)) or root_of(directory).exists() or directory.model.exists()


def supervise(run: Run, parts: Parts, *, interruption: Interruption) -> dict[str, Any]:
    """Carry out the run; return its summary.

    Raises:
        RunStoppedError: it ended early; what there is is saved, and the message says how to go on.
        LauncherError: it was refused before its first step; nothing was written but the log.
    """
    goes_on = run.resumed
    while True:
        try:
            attempt = _Attempt(run, parts, goes_on=goes_on, interruption=interruption)
            with long_lived():
                return attempt.carry_out()
        except _AnewError as lost:
            goes_on, first = lost.goes_on, lost.__cause__
        finally:
            interruption.wait_no_more()
            _close(parts)
        try:
            interruption.check()  # one that came while it saved, or while its processes were ended
            parts = _rebuilt(run, goes_on)
        except BaseException as error:  # noqa: BLE001 - becomes a RunStoppedError, as what ends an attempt does
            attempt.end_between(error, first=first)


def _close(parts: Parts) -> None:
    """End what the run held. All is written by now: what goes wrong here is told, and the outcome stays."""
    try:
        parts.close()
    except KeyboardInterrupt:
        sys.stderr.write("not waiting any longer for processes to end\n")
    except Exception as error:  # noqa: BLE001 - a part may be a user's, and raise anything
        sys.stderr.write(f"not closed cleanly: {type(error).__name__}: {error}\n")


def _rebuilt(run: Run, goes_on: Resumption) -> Parts:
    parts = run.build(run.recipe)
    try:
        goes_on.progress.check(parts)
    except BaseException:
        _close(parts)
        raise
    return parts


class _AnewError(Exception):
    """An attempt has lost its processes, and another may go on where `goes_on` says."""

    def __init__(self, goes_on: Resumption) -> None:
        super().__init__()
        self.goes_on = goes_on


class _Attempt:
    """One set of processes, from where it goes on to wherever it comes."""

    def __init__(self, run: Run, parts: Parts, *, goes_on: Resumption | None, interruption: Interruption) -> None:
        self._run, self._parts, self._goes_on, self._interruption = run, parts, goes_on, interruption
        recipe, directory = run.recipe, run.directory
        progress = Progress() if goes_on is None else goes_on.progress
        counted_until, elapsed_s = None if goes_on is None else goes_on.counted_until, progress.wall_s
        self._keeper = Keeper(
            directory,
            recipe.checkpointing,
            parts=parts,
            progress=progress,
            started=run.started,
            counted_until=counted_until,
        )
        if counted_until is not None:
            elapsed_s = self._keeper.count_time()
        earlier, progress.code = progress.code, code_digests(recipe)
        self._changed_code = "".join(f"; {each}" for each in changed_code(recipe, earlier, progress.code))
        self._discarded = [] if goes_on is None else cut_history(directory, logs=progress.logs)
        self._view = LiveView(*_view_of(recipe))
        plain: Any = to_plain(recipe)
        logger = recipe.logger
        if recipe.cluster.runtime == "ray":  # there the ranks record themselves
            logger = replace(logger, profiler=None)
        self._log = RunLog(directory, logger, recipe=plain, warn=self._view.message, elapsed_s=elapsed_s)
        self._events = Reporter(self._log.events, self._view)

    def carry_out(self) -> dict[str, Any]:
        """The summary of a run that came to its end.

        Raises:
            RunStoppedError: it did not.
            _AnewError: it did not, and may go on with new processes.
            DiskSpaceError: it was refused before its first step.
        """
        after: dict[str, float] | None = None
        stopped: RunStoppedError | None = None
        try:
            with self._log, self._view:
                after = self._train()
            self._interruption.hold()
            base = self._run.recipe.policy.model_name
            save_adapter(self._parts, self._run.directory.adapter, base_model_name=base)
            save_model(self._parts, self._run.directory.model)
        except DiskSpaceError:
            with suppress(OSError, ValueError):  # that there is too little room is what the user must hear
                self._log.finish({"ended_by": "disk_full"}, status="failed")
            raise
        except BaseException as error:  # noqa: BLE001 - becomes a RunStoppedError, once what there is has been saved
            hindered = self._go_on_anew(error)
            self._interruption.hold()
            after, stopped = None, self._end_early(error)
            stopped.args = (f"{stopped}{hindered}",)
        self._keeper.count_time()
        return self._conclude(after, stopped)

    def _train(self) -> dict[str, float]:
        run, progress = self._run, self._keeper.progress
        recipe = run.recipe
        watch = Watch(recipe.health)
        watch.replay(read_metrics(run.directory), errors=progress.reward_errors)
        recorder = Recorder(
            self._log,
            self._view,
            parts=self._parts,
            keeper=self._keeper,
            watch=watch,
            events=self._events,
            interruption=self._interruption,
            metric_name=recipe.checkpointing.metric_name,
        )
        if self._goes_on is not None:
            kept = "; ".join(self._discarded) or "no line of the log is later than it"
            where: Any = {"stage": progress.stage, "step": progress.step or None}
            exact = "" if recipe.grpo is None or recipe.grpo.async_grpo is None else NOT_EXACT
            message = self._goes_on.message + self._changed_code + exact
            self._events.report(self._goes_on.name, message, reaction=kept, **where)
        self._interruption.wait_for_steps()
        return train(recipe, self._parts, recorder, directory=run.directory).metrics()

    def end_between(self, error: BaseException, *, first: BaseException | None) -> NoReturn:
        """End the run between two attempts, after this one: new processes could not be had, or were not waited for.

        Raises:
            RunStoppedError: always; summary and report are written.
        """
        self._interruption.hold()
        interrupted = isinstance(error, KeyboardInterrupt)
        what = "interrupted before it had started again" if interrupted else f"it could not start again: {error}"
        again = f"Go on with: rl-launcher resume {self._run.directory.path}"
        self._events.report(name_of(error), what, reaction="the run ends, with exit code 130 or 1")
        stopped = RunStoppedError(f"stopped: {first}; {what}\n{again}", interrupted=interrupted)
        stopped.__cause__ = error
        self._keeper.count_time()
        self._conclude(None, stopped)
        raise stopped

    def _go_on_anew(self, error: BaseException) -> str:
        """What hindered it, for the message: what came first is what the user must hear first."""
        try:
            self._refuse_or_go_on(error)
        except _AnewError:
            raise
        except KeyboardInterrupt:  # what is at once about it, the interruption knows
            return ""
        except Exception as second:  # noqa: BLE001 - told behind the first
            return f"\nIt could not go on by itself: {second}"
        return ""

    def _refuse_or_go_on(self, error: BaseException) -> None:
        """Raise `_AnewError` where the recipe has restarts left for what happened."""
        most, taken = self._run.recipe.cluster.max_restarts, self._keeper.progress.restarts
        if not isinstance(error, RestartableError) or self._interruption.heard or taken >= most:
            return
        progress = self._keeper.progress
        if not weights_lost(error) and progress.total and progress.version == self._parts.policy.version:
            self._keeper.save()
        found = find_resumption(self._run.directory)
        found.progress.restarts = taken + 1
        found.progress.wall_s, now = self._keeper.count_time(), time.perf_counter()  # lost steps took time too
        reaction = f"restart {taken + 1} of cluster.max_restarts={most}: the run {found.message}"
        self._events.report(error.condition, str(error), reaction=reaction, stage=progress.stage, step=progress.step)
        self._log.finish({"ended_by": error.condition}, status="interrupted")
        raise _AnewError(replace(found, name="restarted", counted_until=now)) from error

    def _end_early(self, error: BaseException) -> RunStoppedError:
        return end_early(
            error,
            directory=self._run.directory,
            parts=self._parts,
            keeper=self._keeper,
            events=self._events,
            at_once=self._interruption.at_once,
        )

    def _conclude(self, after: dict[str, float] | None, stopped: RunStoppedError | None) -> dict[str, Any]:
        run, cause = self._run, None if stopped is None else stopped.__cause__
        summary = summarize(
            run.recipe,
            self._parts,
            run.directory,
            progress=self._keeper.progress,
            after=after,
            ended_by=None if cause is None else name_of(cause),
        )
        failed = stopped is not None
        unwritten = conclude(run.directory, summary, log=self._log, events=self._events, failed=failed)
        if stopped is not None:
            stopped.args = ("\n".join([str(stopped), *unwritten]),)
            raise stopped
        self._keeper.finish()
        return {**summary, "unwritten": unwritten} if unwritten else summary


def _view_of(recipe: Recipe) -> tuple[str, list[StageTotal]]:
    totals = [StageTotal(name=name, steps=stage.max_num_steps) for name, stage in recipe.stages.items()]
    return f"{recipe.headline} · {recipe.data.source} · {recipe.policy.model_name}", totals
