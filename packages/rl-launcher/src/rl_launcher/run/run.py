"""Run a recipe to completion, and resume an interrupted run.

What ends a run early has a name (`rl_launcher.conditions`), and its message says how to go on.

What an attempt does is in `training`; what is said and saved when it ends early, in `ending`.

Whatever ends a run early, a signal or an error, first saves where it stands, and leaves a report of what there is.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from rl_launcher.build import build
from rl_launcher.checkpoints import (
    CheckpointError,
    Keeper,
    Progress,
    cut_history,
    find_latest,
    load_progress,
    save_in_a_step,
    unfinished_of,
)
from rl_launcher.checkpoints.disk import DiskSpaceError, claimed, describe_space
from rl_launcher.checkpoints.export import fill_folder
from rl_launcher.checkpoints.folders import appearing, root_of, write_text
from rl_launcher.checkpoints.recipe_changes import changed_keys, check_changes
from rl_launcher.checks import preflight
from rl_launcher.conditions import name_of, reaction_to
from rl_launcher.errors import Refusal, RestartableError, RunStoppedError
from rl_launcher.gc_freeze import long_lived
from rl_launcher.recipe_files import Resolved, load_recipe
from rl_launcher.recipe_files.dataclass_schema import to_plain
from rl_launcher.recipe_files.load import escape
from rl_launcher.recipe_files.yaml_source import dump
from rl_launcher.run.record import Recorder, summarize
from rl_launcher.run.signals import Interruption
from rl_launcher.run.stage_order import train
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, changed_code, code_digests
from rl_observe import (
    LiveView,
    RunDirectory,
    RunLog,
    StageTotal,
    check_trackers,
    collect_versions,
    read_metrics,
    redact,
    redacted_keys,
    write_origins,
    write_report,
)
from rl_observe.health import Reporter, Watch, is_disk_full

__all__ = [
    "Resumption",
    "Run",
    "conclude",
    "end_early",
    "find_resumption",
    "has_begun",
    "resume",
    "run",
    "save_adapter",
    "save_model",
    "supervise",
    "weights_lost",
]


def weights_lost(error: BaseException) -> bool:
    """Whether there is nothing left in memory that could be saved."""
    return isinstance(error, RestartableError) and error.weights_lost


def save_model(parts: Parts, folder: Path) -> None:
    """Write model and tokenizer as one Hugging Face folder, whole or not at all."""
    with appearing(folder) as unfinished:
        fill_folder(unfinished, policy=parts.policy, tokenizer=parts.tokenizer)


def save_adapter(parts: Parts, folder: Path, *, base_model_name: str) -> None:
    """Write the adapters in PEFT's format, before the model that they are merged in; nothing, where there are none.

    One that is there is of an end that was killed before it wrote the model.
    """
    if parts.selection.adapters is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    policy: Any = parts.policy  # a backend with adapters, or the ranks that have them
    policy.save_adapter(folder, base_model_name=base_model_name)


def end_early(
    error: BaseException,
    *,
    directory: RunDirectory,
    parts: Parts,
    keeper: Keeper,
    events: Reporter,
    at_once: bool,
) -> RunStoppedError:
    """Save where the run stands, and say how to go on, or that nothing could be saved."""
    name, progress = name_of(error), keeper.progress
    cause = _cause(error)
    if is_disk_full(error):
        cause += f". {describe_space(directory.path)}: free some, or start again with run_dir on another disk"
    rest = _saved(directory, parts, keeper, lost=at_once or weights_lost(error))
    events.report(name, cause, reaction=reaction_to(name), stage=progress.stage, step=progress.step)
    stopped = RunStoppedError(
        f"{cause}\n{rest}", interrupted=name == "interrupted", to_be_resumed=name == "must_save_by"
    )
    stopped.__cause__ = error
    return stopped


def conclude(
    directory: RunDirectory, summary: dict[str, Any], *, log: RunLog, events: Reporter, failed: bool
) -> list[str]:
    """Write summary and report, and let the trackers go; what cannot be written is told, and takes nothing away."""
    status = "interrupted" if summary["ended_by"] in {"interrupted", "must_save_by"} else "failed"
    unwritten = list(events.unwritten)

    def finish() -> None:
        summary.update(log.finish(summary, status=status if failed else "finished"))  # type: ignore[arg-type]

    def write() -> None:
        write_text(directory.summary, json.dumps(log.secrets.scrub(summary), indent=2))

    for action in (finish, write, lambda: write_report(directory)):
        try:
            action()
        except (OSError, ValueError) as error:
            unwritten.append(str(error))
    return unwritten


def _saved(directory: RunDirectory, parts: Parts, keeper: Keeper, *, lost: bool) -> str:
    """Save what can be gone on from, or else the weights; return what there is now, and how to go on."""
    progress, again = keeper.progress, f"rl-launcher resume {directory.path}"
    exact = not lost and progress.version == parts.policy.version
    try:
        if exact and progress.total:
            keeper.save()
            return (
                f"Saved after {parts.policy.version} optimizer steps; weights, log and report are in {directory.path}. "
                f"Go on with: {again}"
            )
        if (latest := find_latest(directory)) is not None:
            return f"The newest whole checkpoint is {latest.folder.name}, {latest.describe()}. Go on with: {again}"
        if lost or exact:
            return f"No checkpoint was saved. Begin anew with: {again}"
        folder = save_in_a_step(progress, parts, directory)
    except Exception as second:  # noqa: BLE001 - the first cause is what the user must hear
        return f"The weights could NOT be saved: {second}{_left(directory)}"
    return (
        f"It ended in the middle of a batch of rollouts, from where no run goes on exactly, and before its first "
        f"checkpoint (checkpointing.save_period). The weights of that moment are in {folder}. Start from them: "
        f"rl-launcher export {folder} FOLDER, then policy.model_name=FOLDER sft=null run_dir=<another>"
    )


def _left(directory: RunDirectory) -> str:
    """What was saved before something could not be."""
    try:
        latest = find_latest(directory)
    except CheckpointError as error:
        return f". {error}"
    if latest is None:
        return ""
    return f". {latest.folder.name}, {latest.describe()}, is whole. Go on with: rl-launcher resume {directory.path}"


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"stopped: {error}" if isinstance(error, ValueError | RuntimeError) else f"failed: {error!r}"


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
        Refusal: it has finished, a checkpoint is damaged, or it failed in the middle of a batch and nothing
            earlier was saved.
    """
    if _finished(directory):
        raise Refusal(f"{directory.path} has nothing to resume: it has finished")
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
        Refusal: it was refused before its first step; nothing was written but the log.
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
            with closing(self._log), self._view:
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


def run(resolved: Resolved[Recipe], *, objects: Objects = NO_OBJECTS) -> dict[str, Any]:
    """Carry out a recipe; return the summary that is also in `summary.json`.

    Raises:
        ValueError: the recipe's parts refuse before training; nothing is left behind.
        RunStoppedError: training ended early; the run directory holds what was reached.
    """
    started = time.perf_counter()
    recipe = resolved.value
    _refuse_several_ranks()
    preflight.check(recipe, new_run=True)
    check_trackers(recipe.logger)
    directory = RunDirectory.create(recipe.run_dir)
    build_here = partial(_build, run_dir=directory.path, objects=objects)
    # Discarded within the claim: a folder that another process has claimed, or filled meanwhile, is not ours to remove.
    with Interruption() as interruption, claimed(directory, new=True), _discarded_if_refused(directory):
        parts = build_here(recipe)
        with _closed_if_refused(parts):
            _describe(resolved, directory)
        job = Run(recipe=recipe, directory=directory, build=build_here, started=started)
        return supervise(job, parts, interruption=interruption)


def resume(run_dir: str | Path, overrides: Sequence[str] = (), *, objects: Objects = NO_OBJECTS) -> dict[str, Any]:
    """Carry an interrupted or killed run to its end; on a CPU, bit for bit as if it had not been interrupted.

    Args:
        run_dir: of the run.
        overrides: `section.key=value` of keys that say where and how it runs, not what it learns.

    Raises:
        ValueError: there is nothing to resume, or a part refuses; the run directory stays as it was.
        RunStoppedError: it ended early again.
    """
    started = time.perf_counter()
    _refuse_several_ranks()
    directory = RunDirectory.open(run_dir)
    build_here = partial(_build, run_dir=directory.path, objects=objects)
    with claimed(directory), Interruption() as interruption:
        resolved, changes = _changed_recipe(directory, overrides)
        found = find_resumption(directory)
        preflight.check(resolved.value, new_run=False)
        check_trackers(resolved.value.logger)
        parts = build_here(resolved.value)
        with _closed_if_refused(parts):
            found.progress.check(parts)
            if changes:
                write_text(directory.recipe, _recipe_text(resolved))
        goes_on = replace(found, message=found.message + _told(changes))
        job = Run(
            recipe=resolved.value,
            directory=directory,
            build=build_here,
            started=started,
            resumed=goes_on,
        )
        return supervise(job, parts, interruption=interruption)


@contextmanager
def _discarded_if_refused(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except RunStoppedError:
        raise  # its message says what is in the folder, and how to go on from there
    except BaseException:
        if not (has_begun(directory) or directory.summary.exists()):
            directory.discard()  # nothing was trained, so nothing is lost
        raise


@contextmanager
def _closed_if_refused(parts: Parts) -> Iterator[None]:
    try:
        yield
    except BaseException:
        parts.close()
        raise


def _changed_recipe(
    directory: RunDirectory, overrides: Sequence[str]
) -> tuple[Resolved[Recipe], dict[str, tuple[Any, Any]]]:
    """The recipe that a run goes on with, and in what it differs from the one that it began with."""
    before = load_recipe(directory.recipe, schema=Recipe)
    resolved = load_recipe(directory.recipe, schema=Recipe, overrides=overrides) if overrides else before
    if missing := redacted_keys(to_plain(resolved.value)):
        raise Refusal(
            f"{', '.join(missing)} were kept out of {directory.recipe}, since they look like credentials; give them "
            f"again: rl-launcher resume {directory.path} {' '.join(f'{key}=...' for key in missing)}"
        )
    changes = changed_keys(to_plain(before.value), to_plain(resolved.value))
    check_changes(changes)
    return resolved, changes


def _told(changes: dict[str, tuple[Any, Any]]) -> str:
    shown = redact({key: after for key, (_, after) in changes.items()})
    return "".join(f"; {key} is now {value}" for key, value in shown.items())


def _refuse_several_ranks() -> None:
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks not in {"", "1"}:
        raise Refusal(
            f"rl-launcher is one process that starts all others, and WORLD_SIZE={ranks}; start it without torchrun, "
            f"with cluster.runtime=ray for several ranks"
        )


def _build(recipe: Recipe, *, run_dir: Path, objects: Objects) -> Parts:
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would run through the live view
    return build(recipe, run_dir=run_dir, objects=objects)


def _describe(resolved: Resolved[Recipe], directory: RunDirectory) -> None:
    """Write down what the run is, credentials left out."""
    write_text(directory.recipe, _recipe_text(resolved))
    write_origins(directory, resolved.origins, recipe=to_plain(resolved.value))
    directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")


def _recipe_text(resolved: Resolved[Recipe]) -> str:
    return dump(escape(redact(to_plain(resolved.value))))
