"""Run a recipe to completion, and resume an interrupted run.

`run` and `resume` prepare a `Run`; `Run.execute` builds the parts, trains the stages in order, saves the model and
writes the summary. When a worker dies it restarts from the last checkpoint; whatever else ends it early is saved first.
"""

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from rl_backends.checkpoints.folders import atomic_folder, write_text
from rl_launcher.build.build import build
from rl_launcher.build.companions import reward_model_folder, write_model
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints import (
    CheckpointError,
    CheckpointManager,
    Progress,
    find_latest,
    load_progress,
    save_mid_step,
    truncate_logs,
    unfinished_of,
)
from rl_launcher.checkpoints.disk import STATE_PER_WEIGHT, DiskSpaceError, check_space, claimed, describe_space
from rl_launcher.checkpoints.folders import root_of
from rl_launcher.checkpoints.recipe_changes import changed_keys, check_changes
from rl_launcher.checks import preflight
from rl_launcher.checks.explain import describe_backend
from rl_launcher.errors import (
    ConditionError,
    Refusal,
    RestartableError,
    RunStoppedError,
    is_refusal,
    user_frames,
    user_location,
)
from rl_launcher.recipe_files import Resolved, load_recipe
from rl_launcher.recipe_files.dataclass_schema import to_plain
from rl_launcher.run import driver_process
from rl_launcher.run.conditions import name_of, reaction_to
from rl_launcher.run.evaluate import Evaluator, turn_limits
from rl_launcher.run.gc_freeze import long_lived
from rl_launcher.run.prediction import WAIT_SHARE, BackgroundPrediction, predict_in_background
from rl_launcher.run.record import Recorder, has_trained, summarize
from rl_launcher.run.signals import Interruption
from rl_launcher.run.stages import distill, dpo, grpo, kto, orpo, ppo, reward_model, sft
from rl_launcher.schema import Recipe, steps_of_epochs
from rl_launcher.user_code import NO_OBJECTS, Objects, changed_code, code_digests, named_code
from rl_observe import (
    LiveView,
    RunDirectory,
    RunLog,
    Secrets,
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

ERROR_FILE = "error.txt"
"""In the run directory: the whole traceback of what ended the run."""
STAGES: dict[str, Callable[..., None]] = {
    "sft": sft.run,
    "reward_model": reward_model.run,
    "grpo": grpo.run,
    "ppo": ppo.run,
    "dpo": dpo.run,
    "kto": kto.run,
    "orpo": orpo.run,
    "distill": distill.run,
}
NEVER_STEPPED = {
    "grpo": "the rewards were equal within every group of every batch",
    "dpo": "no two responses to a prompt had different rewards in any batch, so no pair was found",
    "distill": "no response of any batch had another that succeeded for its teacher to be shown",
}
"""Why a stage that learns from its own responses ended without a step."""
LIKELY_CAUSES = (
    "so the weights are unchanged. Likely causes: the reward never recognises a right response (its format, its "
    "parser); the task is too hard or too easy for this policy; the sft stage was left out. `rl-launcher try-reward "
    "RECIPE` shows a few responses with their rewards before you train again"
)
NOT_EXACT = "; which rollout meets which weights depends on timing (grpo.async_grpo), so the curve is not bitwise equal"
NOT_EXACT_TURNS = (
    "; episodes of several turns ask the engine one response at a time, and which of them share a forward depends on "
    "timing, so log-probabilities may differ in their last bits"
)


def run(resolved: Resolved[Recipe], *, objects: Objects = NO_OBJECTS) -> dict[str, Any]:
    """Train as a recipe says; return the summary that is also in `summary.json`.

    Raises:
        Refusal: the recipe's parts refuse before training; nothing is left behind.
        RunStoppedError: training ended early; the run directory holds what was reached.
    """
    started, recipe = time.perf_counter(), resolved.value
    _refuse_torchrun()
    preflight.check(recipe, new_run=True)
    check_trackers(recipe.logger)
    with Interruption() as interruption:
        directory = RunDirectory.create(recipe.run_dir)
        # Discarded within the claim: a folder that another process has claimed, or filled meanwhile, is not ours.
        with claimed(directory, new=True), _discarded_if_refused(directory):
            driver_process.note("claimed")
            job = Run(recipe, directory, interruption=interruption, objects=objects, started=started)
            job.on_built = partial(_describe, resolved, directory)
            return job.execute()


def resume(run_dir: str | Path, overrides: Sequence[str] = (), *, objects: Objects = NO_OBJECTS) -> dict[str, Any]:
    """Continue an interrupted or killed run to its end; on a CPU, bit for bit as if it had not been interrupted.

    Args:
        run_dir: of the run.
        overrides: `section.key=value` of keys that say where and how it runs, not what it learns.
        objects: Python objects that the run was started with.

    Raises:
        Refusal: there is nothing to resume, or a part refuses; the run directory stays as it was.
        RunStoppedError: it ended early again.
    """
    started = time.perf_counter()
    _refuse_torchrun()
    directory = RunDirectory.open(run_dir)
    with claimed(directory), Interruption() as interruption:
        resolved, changes = _changed_recipe(directory, overrides)
        found = find_resumption(directory)
        preflight.check(resolved.value, new_run=False)
        check_trackers(resolved.value.logger)
        shown = redact({key: after for key, (_, after) in changes.items()})
        message = found.message + "".join(f"; {key} is now {value}" for key, value in shown.items())
        job = Run(resolved.value, directory, interruption=interruption, objects=objects, started=started)
        job.resumption = replace(found, message=message)
        if changes:
            job.on_built = partial(write_text, directory.recipe, resolved.to_yaml(hide=redact))
        return job.execute()


def restart(recipe: Recipe, *, restarts: int) -> dict[str, Any]:
    """Continue a run whose driver died, in a new one; as `resume`, but by itself, as restart number `restarts`."""
    started = time.perf_counter()
    directory = RunDirectory.open(recipe.run_dir)
    with claimed(directory), Interruption() as interruption:
        found = find_resumption(directory)
        found.progress.restarts = restarts
        job = Run(recipe, directory, interruption=interruption, started=started)
        job.resumption = replace(found, name="restarted")
        return job.execute()


class Run:
    """One run in this process: the parts it is made of, how far it is, and what happens next.

    `state` goes from "building" over "training" and "saving" to "finished"; from "training" to "restarting" and back
    after a worker's death; and to "stopped" when the run ends early.
    """

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        interruption: Interruption,
        objects: Objects = NO_OBJECTS,
        build: Callable[[Recipe], Parts] | None = None,
        started: float = 0.0,
    ) -> None:
        self.recipe, self.directory, self.interruption = recipe, directory, interruption
        self.state: str = "building"
        self.resumption: Resumption | None = None
        """Where training continues; None for a run from its beginning."""
        self.on_built: Callable[[], object] = lambda: None
        """Called once when the parts are built and accepted: from here on the run directory describes this run."""
        self._started = started
        self._prediction: BackgroundPrediction | None = None
        self._make_parts = build or partial(_build, run_dir=directory.path, objects=objects)

    def execute(self) -> dict[str, Any]:
        """Build, train, save, conclude; restart when a worker dies. Return the summary.

        Raises:
            Refusal: it was refused before its first step; nothing was written but the log.
            RunStoppedError: it ended early; everything there is was saved, and the message says how to continue.
        """
        self._build()
        try:
            self.on_built()
            secrets = Secrets.of(to_plain(self.recipe))
            self._prediction = predict_in_background(self.recipe, self.parts, self.directory, secrets=secrets)
        except BaseException:
            self.parts.close()
            raise
        try:
            return self._run_to_the_end()
        finally:
            self._end_prediction(wait_s=0.0)

    def _run_to_the_end(self) -> dict[str, Any]:
        while True:
            failure: BaseException | None = None
            after: dict[str, float] | None = None
            self.state = "training"
            try:
                self._open_log()
                with long_lived():
                    try:
                        with closing(self.log), self.view:
                            after = self._train()
                        self.state = "saving"
                        self.interruption.hold()
                        self._save_model()
                    except DiskSpaceError:
                        with suppress(OSError, ValueError):  # the lack of space is what the user must read
                            self.log.finish({"ended_by": "disk_full"}, status="failed")
                        raise
                    except BaseException as error:  # noqa: BLE001 - becomes a RunStoppedError once everything is saved
                        failure = error
                    hindered = "" if failure is None else self._plan_restart(failure)
                    if self.state != "restarting":
                        stopped = None if failure is None else self._stop(failure, hindered)
                        return self._conclude(after, stopped)
            finally:
                self.interruption.wait_no_more()
                _close(self.parts)
            try:
                self.interruption.check()  # a signal that came while it saved, or while its processes were ended
                self._build()
            except BaseException as error:  # noqa: BLE001 - becomes a RunStoppedError, as what ends training does
                self._stop_between(error, first=failure)

    def _build(self) -> None:
        """Make the parts, and check that they are those that the run began with."""
        parts = self._make_parts(self.recipe)
        try:
            self.recipe = within_epochs(self.recipe, parts)
            if self.resumption is not None:
                self.resumption.progress.check(parts)
        except BaseException:
            _close(parts)
            raise
        self.parts = parts

    def _open_log(self) -> None:
        """Open log, live view and recorder at the step where training continues."""
        recipe, directory, resumption = self.recipe, self.directory, self.resumption
        self.progress = progress = Progress() if resumption is None else resumption.progress
        counted_until, elapsed_s = None if resumption is None else resumption.counted_until, progress.wall_s
        self.keeper = CheckpointManager(
            directory,
            recipe.checkpointing,
            parts=self.parts,
            progress=progress,
            started=self._started,
            counted_until=counted_until,
        )
        if counted_until is not None:
            elapsed_s = self.keeper.count_time()
        earlier, progress.code = progress.code, code_digests(recipe)
        _describe_code(directory, recipe, progress.code)
        changed = "".join(f"; {each}" for each in changed_code(recipe, earlier, progress.code))
        discarded = [] if resumption is None else truncate_logs(directory, logs=progress.logs)
        totals = [StageTotal(name=name, steps=stage.max_num_steps) for name, stage in recipe.stages.items()]
        self.view = LiveView(f"{recipe.headline} · {recipe.data.source} · {recipe.policy.model_name}", totals)
        logger = recipe.logger
        plain: Any = to_plain(recipe)
        if recipe.cluster.runtime == "ray":  # there the ranks record themselves
            logger = replace(logger, profiler=None)
        self.log = RunLog(directory, logger, recipe=plain, warn=self.view.message, elapsed_s=elapsed_s)
        reached = list(recipe.stages).index(progress.stage) if progress.stage in recipe.stages else -1
        for number, name in enumerate(recipe.stages):  # what is going to be taken again
            if number >= reached:
                self.log.recorded_steps.discard_after(name, progress.step if number == reached else 0)
        self.events = Reporter(self.log.events, self.view)
        watch = Watch(recipe.health)
        watch.replay(read_metrics(directory), errors=progress.reward_errors)
        self.recorder = Recorder(
            self.log,
            self.view,
            parts=self.parts,
            keeper=self.keeper,
            watch=watch,
            events=self.events,
            interruption=self.interruption,
            metric_name=recipe.checkpointing.metric_name,
        )
        self._resumed_with = changed, "; ".join(discarded) or "no line of the log is later than it"

    def _train(self) -> dict[str, float]:
        """Go through the stages, or what is left of them; return how the result does on held-out data.

        sft -> reward_model -> held-out before -> grpo, ppo, dpo, kto, orpo or distill -> held-out after
        """
        recipe, parts, recorder, progress = self.recipe, self.parts, self.recorder, self.progress
        if self.resumption is not None:
            changed, discarded = self._resumed_with
            message = self.resumption.message + changed
            if recipe.grpo is not None and recipe.grpo.async_grpo is not None:
                message += NOT_EXACT
            elif turn_limits(recipe)["max_turns"] > 1:
                message += NOT_EXACT_TURNS
            where: Any = {"stage": progress.stage, "step": progress.step or None}
            self.events.report(self.resumption.name, message, reaction=discarded, **where)
        driver_process.note("training", progress.restarts)
        self.interruption.wait_for_steps()
        evaluator, headline = Evaluator(parts, recipe), recipe.headline
        progress.restore(parts)
        self._introduce()
        names = [*recipe.stages]
        for name, stage in recipe.stages.items():
            is_headline = name == headline
            if progress.stage in names and names.index(name) < names.index(progress.stage):
                continue  # a resumed run is past this stage
            if is_headline and recipe.is_judged_by_model:
                parts.companions.judge_with(reward_model_folder(self.directory), chat=parts.data.chat)
            if is_headline and progress.before is None:
                before = evaluator.outcome()
                progress.before = before.metrics()
                if progress.before:
                    recorder.evaluation(headline, progress.before)
                    recorder.message(f"held out before {headline}: {before.describe()}")
                recorder.log.write_samples(evaluator.samples(before, stage=headline, when="before"))
                recorder.check()
            recorder.start()
            STAGES[name](stage, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
        if (why := NEVER_STEPPED.get(headline)) and not has_trained(self.directory, headline):
            raise ConditionError("no_signal", f"{headline} took no optimizer step: {why}, {LIKELY_CAUSES}")
        after = evaluator.outcome()
        if after.metrics():
            recorder.message(f"held out after {headline}: {after.describe()}")
        recorder.log.write_samples(evaluator.samples(after, stage=headline, when="after"))
        if parts.reward_errors:
            zero = recipe.env is not None and recipe.env.on_error == "zero"
            became = "counted as 0 (env.on_error=zero)" if zero else "left out of training"
            recorder.message(f"{parts.reward_errors} responses could not be judged and were {became}")
        return after.metrics()

    def _introduce(self) -> None:
        """Print what is unusual about this run, refit its engine for the first time, and check the disk."""
        parts, recipe, recorder = self.parts, self.recipe, self.recorder
        if not parts.selection.is_plain:
            recorder.message(describe_backend(parts.selection))
        if parts.data.skipped.count:
            recorder.message(f"data.on_bad_row=skip: {parts.data.skipped}")
        if parts.data.held_out_too_long and recipe.generates:
            recorder.message(
                f"{parts.data.held_out_too_long} held-out prompts leave no room for a response of policy.generation."
                f"max_new_tokens={recipe.policy.generation.max_new_tokens}, and are left out of sampling"
            )
        recorder.report_events()
        if recipe.generates:
            parts.weight_sync(version=parts.policy.version)  # proves that every weight of the engine can be fed
        adapters = parts.selection.adapters is not None  # then nearly all of the model is frozen and not in checkpoints
        check_space(
            self.directory.path,
            checkpoint_bytes=parts.weight_bytes * (1 if adapters else STATE_PER_WEIGHT),
            model_bytes=parts.weight_bytes,
            config=recipe.checkpointing,
        )

    def _save_model(self) -> None:
        """Write the adapters in PEFT's format, if there are any, then the model; each whole or not at all.

        `model` is the policy, or the reward model if that is the last stage; the policy of an sft stage before it is
        then in `policy`.
        """
        parts, policy = self.parts, self.parts.policy
        if parts.selection.adapters is not None:
            # A folder that is there already is left from an end that was killed before it wrote the model.
            shutil.rmtree(self.directory.adapter, ignore_errors=True)
            policy.save_adapter(self.directory.adapter, base_model_name=self.recipe.policy.model_name)
        if self.recipe.headline != "reward_model":
            with atomic_folder(self.directory.model) as unfinished:
                write_model(unfinished, model=policy, tokenizer=parts.tokenizer)
            return
        if self.recipe.sft is not None:
            with atomic_folder(self.directory.path / "policy") as unfinished:
                write_model(unfinished, model=policy, tokenizer=parts.tokenizer)
        with atomic_folder(self.directory.model) as unfinished:  # what the run is about
            shutil.copytree(reward_model_folder(self.directory), unfinished, dirs_exist_ok=True)
        shutil.rmtree(reward_model_folder(self.directory))

    def _plan_restart(self, error: BaseException) -> str:
        """Set `resumption` and the state "restarting" if the recipe has restarts left for `error`.

        Returns:
            What went wrong in the attempt, for the message: "" if nothing did, or no restart was due.
        """
        progress, most = self.progress, self.recipe.cluster.max_restarts
        taken = progress.restarts
        if not isinstance(error, RestartableError) or self.interruption.heard or taken >= most:
            return ""
        try:
            if not error.weights_lost and progress.total and progress.versions == self.parts.versions:
                self.keeper.save()
            found = find_resumption(self.directory)
            found.progress.restarts = taken + 1
            found.progress.wall_s, now = self.keeper.count_time(), time.perf_counter()  # lost steps took time too
            reaction = f"restart {taken + 1} of cluster.max_restarts={most}: the run {found.message}"
            where: Any = {"stage": progress.stage, "step": progress.step}
            self.events.report(error.condition, str(error), reaction=reaction, **where)
            self.log.finish({"ended_by": error.condition}, status="interrupted")
        except KeyboardInterrupt:  # whether it was the second signal, `interruption` knows
            return ""
        except Exception as second:  # noqa: BLE001 - told behind the first, which the user must read first
            return f"\nIt could not restart by itself: {second}"
        self.resumption = replace(found, name="restarted", counted_until=now)
        self.state = "restarting"
        return ""

    def _stop(self, error: BaseException, hindered: str) -> RunStoppedError:
        """Save where the run stands, and say how to continue, or that nothing could be saved."""
        self.interruption.hold()
        self.state = "stopped"
        name, progress, directory = name_of(error), self.progress, self.directory
        cause = _cause(error)
        if is_disk_full(error):
            cause += f". {describe_space(directory.path)}: free some, or start again with run_dir on another disk"
        lost = self.interruption.at_once or (isinstance(error, RestartableError) and error.weights_lost)
        untrained = name == "no_signal" and not self.parts.policy.version  # then there is nothing to save
        saved = "" if untrained else self._save_state(lost=lost)
        told = cause if (place := user_location(error)) is None else f"{cause} ({place})"
        self.events.report(name, told, reaction=reaction_to(name), stage=progress.stage, step=progress.step)
        lines = [cause, *self._explain_failure(error), *([saved] if saved else [])]
        stopped = RunStoppedError(
            "\n".join(lines) + hindered, interrupted=name == "interrupted", to_be_resumed=name == "must_save_by"
        )
        stopped.__cause__ = error
        return stopped

    def _explain_failure(self, error: BaseException) -> list[str]:
        """Write the whole traceback to error.txt; return the user's own frames, or all of it if it may be our bug."""
        if isinstance(error, KeyboardInterrupt | ConditionError | RestartableError):
            return []
        file = self.directory.path / ERROR_FILE
        whole = str(self.log.secrets.scrub("".join(traceback.format_exception(error))))
        try:
            write_text(file, whole)
        except OSError as second:
            where = f"The traceback could not be written: {second}"
        else:
            where = f"The whole traceback is in {file}"
        if frames := user_frames(error):
            return [frames, where]
        return [where] if is_refusal(error) or is_disk_full(error) else [whole.rstrip(), where]

    def _save_state(self, *, lost: bool) -> str:
        """Save a checkpoint to continue from, or else the weights; return what there is now, and how to continue."""
        progress, parts, directory = self.progress, self.parts, self.directory
        again = f"rl-launcher resume {directory.path}"
        exact = not lost and progress.versions == parts.versions
        try:
            if exact and progress.total:
                self.keeper.save()
                return (
                    f"Saved after {parts.policy.version} optimizer steps; weights, log and report are in "
                    f"{directory.path}. Continue with: {again}"
                )
            if (latest := find_latest(directory)) is not None:
                newest = f"The newest whole checkpoint is {latest.folder.name}, {latest.describe()}"
                return f"{newest}. Continue with: {again}"
            if lost or exact:
                return f"No checkpoint was saved. Start again with: {again}"
            folder = save_mid_step(progress, parts, directory)
        except Exception as second:  # noqa: BLE001 - the first cause is what the user must read
            failed = f"The weights could NOT be saved: {second}"
            with suppress(CheckpointError):
                if (latest := find_latest(directory)) is not None:
                    failed += f". {latest.folder.name}, {latest.describe()}, is whole. Continue with: {again}"
            return failed
        return (
            f"It ended in the middle of a batch of rollouts, from where no run continues exactly, and before its first "
            f"checkpoint (checkpointing.save_period). The weights of that moment are in {folder}. Start from them: "
            f"rl-launcher export {folder} FOLDER, then policy.model_name=FOLDER sft=null run_dir=<another>"
        )

    def _stop_between(self, error: BaseException, *, first: BaseException | None) -> NoReturn:
        """End the run after a worker's death: new processes could not be had, or were not waited for.

        Raises:
            RunStoppedError: always; summary and report are written.
        """
        self.interruption.hold()
        self.state = "stopped"
        interrupted = isinstance(error, KeyboardInterrupt)
        what = "interrupted before it had restarted" if interrupted else f"it could not restart: {error}"
        again = f"Continue with: rl-launcher resume {self.directory.path}"
        self.events.report(name_of(error), what, reaction="the run ends, with exit code 130 or 1")
        lines = [f"stopped: {first}; {what}", *self._explain_failure(error), again]
        stopped = RunStoppedError("\n".join(lines), interrupted=interrupted)
        stopped.__cause__ = error
        self._conclude(None, stopped)
        raise stopped

    def _conclude(self, after: dict[str, float] | None, stopped: RunStoppedError | None) -> dict[str, Any]:
        """Write summary and report, and close the trackers. What cannot be written is reported, and nothing is lost.

        Raises:
            RunStoppedError: `stopped`, if that is given.
        """
        self.keeper.count_time()
        self._end_prediction(wait_s=WAIT_SHARE * self.progress.wall_s)
        directory, cause = self.directory, None if stopped is None else stopped.__cause__
        summary = summarize(self.recipe, self.parts, directory, progress=self.progress, after=after, error=cause)
        interrupted = summary["ended_by"] in {"interrupted", "must_save_by"}
        status: Any = "finished" if stopped is None else "interrupted" if interrupted else "failed"
        unwritten = list(self.events.unwritten)
        for action in (
            lambda: summary.update(self.log.finish(summary, status=status)),
            lambda: write_text(directory.summary, json.dumps(self.log.secrets.scrub(summary), indent=2)),
            lambda: write_report(directory),
        ):
            try:
                action()
            except (OSError, ValueError) as error:
                unwritten.append(str(error))
        if stopped is not None:
            stopped.args = ("\n".join([str(stopped), *unwritten]),)
            raise stopped
        self.keeper.finish()
        (directory.path / ERROR_FILE).unlink(missing_ok=True)  # of an earlier process that this one has resumed
        self.state = "finished"
        return {**summary, "unwritten": unwritten} if unwritten else summary

    def _end_prediction(self, *, wait_s: float) -> None:
        if self._prediction is not None:
            self._prediction.close(wait_s=wait_s)


def within_epochs(recipe: Recipe, parts: Parts) -> Recipe:
    """The recipe with `max_num_steps` of each stage lowered to what `max_num_epochs` passes over its data take.

    Raises:
        Refusal: a warm-up is then as long as the stage.
    """
    data, stages = parts.data, {}
    for name, stage in recipe.stages.items():
        if stage.max_num_epochs is None:
            continue
        given = parts.reward_pairs if name == "reward_model" else data.pairs
        if name == "sft":
            number = len(data.demonstrations)
        elif name == "kto" and data.labelled is not None:
            number = len(data.labelled.train)
        elif name in {"reward_model", "dpo", "orpo"} and given is not None:
            number = len(given.train.tokens) // 2
        else:
            number = len(data.prompts)
        stages[name] = replace(stage, max_num_steps=steps_of_epochs(stage, num_items=number))
    try:
        limited: Recipe = replace(recipe, **stages) if stages else recipe
    except ValueError as error:
        raise Refusal(f"{error}; {', '.join(f'{name}.max_num_epochs' for name in stages)} set these steps") from error
    return limited


def _cause(error: BaseException) -> str:
    """Why a run ended, in one sentence."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SystemExit):
        return f"stopped: a function that the recipe names called sys.exit({error.code!r})"
    if isinstance(error, ConditionError | RuntimeError | ValueError):
        return f"stopped: {error}"
    return f"failed: {error!r}"


def _close(parts: Parts) -> None:
    """Close the parts. Everything is written by now: what goes wrong here is reported, and the outcome stays."""
    try:
        parts.close()
    except KeyboardInterrupt:
        sys.stderr.write("not waiting any longer for processes to end\n")
    except Exception as error:  # noqa: BLE001 - a part may be a user's, and raise anything
        sys.stderr.write(f"not closed cleanly: {type(error).__name__}: {error}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run continues."""

    progress: Progress
    message: str
    """The same in words."""
    name: str = "resumed"
    """Of the condition: `resumed` by a person, or `restarted` by itself."""
    counted_until: float | None = None
    """`time.perf_counter()` up to which `progress` has counted the seconds of this process; None for another's."""


def find_resumption(directory: RunDirectory) -> Resumption:
    """Where a run would continue: at its newest checkpoint, or, if a kill left none, at its beginning.

    Raises:
        Refusal: it has finished, a checkpoint is damaged, or it failed in the middle of a batch and nothing
            earlier was saved.
    """
    latest = find_latest(directory)
    if directory.model.is_dir():
        # A model without a summary is of a run that was killed before it wrote one: made again from a checkpoint.
        try:
            finished = not json.loads(directory.summary.read_text(encoding="utf-8"))["interrupted"]
        except (OSError, ValueError, KeyError):
            finished = False
        if finished or latest is None:
            raise Refusal(f"{directory.path} has nothing to resume: it has finished")
    torn = [f"{path.name} is torn, and was not read" for path in unfinished_of(directory)]
    if latest is not None:
        progress = load_progress(latest)
        message = f"continues after {latest.describe()}, from {latest.folder.name}"
    elif halves := sorted(root_of(directory).glob("in_step_*")):
        raise CheckpointError(
            f"{directory.path} has nothing to resume: it failed in the middle of a batch of rollouts, before its first "
            f"checkpoint; the weights of that moment are in {halves[-1]}. Start from them: rl-launcher export "
            f"{halves[-1]} FOLDER, then policy.model_name=FOLDER sft=null run_dir=<another>"
        )
    else:
        progress, message = Progress(), "starts from its beginning, since no checkpoint was whole"
    return Resumption(progress=progress, message="; ".join([message, *torn]))


@contextmanager
def _discarded_if_refused(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except RunStoppedError:
        raise  # its message says what is in the folder, and how to continue from there
    except BaseException:
        begun = read_metrics(directory) or root_of(directory).exists() or directory.model.exists()
        if not (begun or directory.summary.exists()):
            directory.discard()  # nothing was trained, so nothing is lost
        raise


def _changed_recipe(
    directory: RunDirectory, overrides: Sequence[str]
) -> tuple[Resolved[Recipe], dict[str, tuple[Any, Any]]]:
    """The recipe that a run continues with, and the keys in which it differs from the one that it began with."""
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


def _refuse_torchrun() -> None:
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks not in {"", "1"}:
        raise Refusal(
            f"rl-launcher is one process that starts all others, and WORLD_SIZE={ranks}; start it without torchrun, "
            f"with cluster.runtime=ray for several ranks"
        )


def _build(recipe: Recipe, *, run_dir: Path, objects: Objects) -> Parts:
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would break the live view
    return build(recipe, run_dir=run_dir, objects=objects)


def _describe(resolved: Resolved[Recipe], directory: RunDirectory) -> None:
    """Write recipe, origins and versions of the run, without credentials."""
    write_text(directory.recipe, resolved.to_yaml(hide=redact))
    write_origins(directory, resolved.origins, recipe=to_plain(resolved.value))
    directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")


def _describe_code(directory: RunDirectory, recipe: Recipe, digests: Mapping[str, str]) -> None:
    """Add the files that the recipe names functions of, with their SHA-256, to the versions: `user_code`, by key."""
    text = directory.versions.read_text(encoding="utf-8") if directory.versions.exists() else "{}"
    named = named_code(recipe)
    code = {key: {"named": named[key], "sha256": digest} for key, digest in digests.items()}
    directory.versions.write_text(json.dumps({**json.loads(text), "user_code": code}, indent=2), encoding="utf-8")
