"""One run, from a resolved recipe to a run directory that says all about it.

    directory -> parts -> sft -> held-out before -> grpo or dpo -> held-out after -> model, summary, report

Whatever ends a run early, a signal or an error, first saves the weights, the log and a report of what there is.
"""

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rl_launcher.building import Parts, build
from rl_launcher.errors import LauncherError
from rl_launcher.evaluating import Evaluator, HeldOut
from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, MetricsLog, RunDirectory, StageTotal, collect_versions, write_report
from rl_launcher.recipe import Resolved
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.stages import dpo, grpo, sft

__all__ = ["RunStoppedError", "run"]


class RunStoppedError(LauncherError):
    """A run that ended early; `interrupted` says whether a person or a signal ended it, and the cause is chained."""

    def __init__(self, message: str, *, interrupted: bool) -> None:
        super().__init__(message)
        self.interrupted = interrupted


@dataclass(slots=True, kw_only=True)
class _Outcome:
    """What is known of the result so far."""

    before: HeldOut | None = None
    after: HeldOut | None = None
    interrupted: bool = False


def run(resolved: Resolved[Recipe]) -> dict[str, Any]:
    """Carry out a recipe; return the summary that is also in `summary.json`.

    Raises:
        ValueError: the recipe's parts refuse before training; nothing is left behind.
        RunStoppedError: training ended early; the run directory holds what was reached.
    """
    started, recipe = time.perf_counter(), resolved.value
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would run through the live view
    directory = RunDirectory.create(recipe.run_dir)
    try:
        parts = build(recipe)
        directory.recipe.write_text(resolved.to_yaml(), encoding="utf-8")
        directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)  # nothing was trained, so nothing is lost
        raise
    outcome = _Outcome()
    with Interruption() as interruption:
        try:
            with MetricsLog(directory) as log, LiveView(_title(recipe), _stage_totals(recipe)) as view:
                recorder = Recorder(log, view, interruption)
                _train(recipe, parts, recorder, outcome=outcome)
            interruption.hold()
            _save(parts, directory.model)
        except BaseException as error:
            interruption.hold()
            outcome.interrupted = True
            raise _stopped(error, directory, parts) from error
        finally:
            summary = _summary(recipe, parts, recorder, directory=directory, outcome=outcome)
            summary["wall_s"] = round(time.perf_counter() - started, 2)
            directory.summary.write_text(json.dumps(summary, indent=2), encoding="utf-8")
            write_report(directory)
    return summary


def _train(recipe: Recipe, parts: Parts, recorder: Recorder, *, outcome: _Outcome) -> None:
    evaluator = Evaluator(parts, recipe)
    parts.weight_sync(version=0)  # proves, before anything is trained, that every weight of the engine can be fed
    headline = headline_stage(recipe)
    if recipe.sft is not None and headline != "sft":
        recorder.start()
        sft.run(recipe.sft, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    outcome.before = evaluator.both()
    recorder.evaluation(headline, outcome.before.metrics())
    recorder.message(f"held out before {headline}: {outcome.before.describe()}")
    recorder.log.write_samples(evaluator.samples(outcome.before, stage=headline, when="before"))
    recorder.start()
    if recipe.grpo is not None:
        grpo.run(recipe.grpo, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    elif recipe.dpo is not None:
        dpo.run(recipe.dpo, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    elif recipe.sft is not None:
        sft.run(recipe.sft, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    outcome.after = evaluator.both()
    recorder.message(f"held out after {headline}: {outcome.after.describe()}")
    recorder.log.write_samples(evaluator.samples(outcome.after, stage=headline, when="after"))
    if parts.environment.errors:
        recorder.message(f"{parts.environment.errors} answers could not be judged and counted as 0 (env.on_error=zero)")


def headline_stage(recipe: Recipe) -> str:
    """The stage that the run is about: before and after mean before and after this one."""
    return "grpo" if recipe.grpo is not None else "dpo" if recipe.dpo is not None else "sft"


def _summary(
    recipe: Recipe, parts: Parts, recorder: Recorder, *, directory: RunDirectory, outcome: _Outcome
) -> dict[str, Any]:
    headline = headline_stage(recipe)
    report = parts.weight_sync.last
    return {
        "run_dir": str(directory.path),
        "task": recipe.data.source,
        "algorithm": headline,
        "seed": recipe.seed,
        "interrupted": outcome.interrupted,
        "held_out_sampled_before": outcome.before and round(outcome.before.sampled.mean, 4),
        "held_out_sampled_after": outcome.after and round(outcome.after.sampled.mean, 4),
        "held_out_greedy_before": outcome.before and round(outcome.before.greedy.mean, 4),
        "held_out_greedy_after": outcome.after and round(outcome.after.greedy.mean, 4),
        "held_out_size": Evaluator(parts, recipe).size,
        "steps": parts.policy.version,
        "tokens": recorder.num_tokens,
        "reward_errors": parts.environment.errors,
        "phase_share": {name: round(share, 4) for name, share in recorder.phase_share(headline).items()},
        "refit": report
        and {
            "count": parts.weight_sync.count,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "digest": report.digest,
            "version": report.version,
        },
    }


def _save(parts: Parts, folder: Path) -> None:
    parts.policy.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)


def _stopped(error: BaseException, directory: RunDirectory, parts: Parts) -> RunStoppedError:
    """Save the weights as they are, and say where."""
    _save(parts, directory.interrupted)
    return RunStoppedError(
        f"{_cause(error)}\n"
        f"The weights after {parts.policy.version} optimizer steps are in {directory.interrupted}; log and report "
        f"lie beside it. Go on from there with policy.model_name={directory.interrupted} sft=null run_dir=<another>",
        interrupted=isinstance(error, KeyboardInterrupt),
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"stopped: {error}" if isinstance(error, ValueError | RuntimeError) else f"failed: {error!r}"


def _title(recipe: Recipe) -> str:
    return f"{headline_stage(recipe)} · {recipe.data.source} · {recipe.policy.model_name}"


def _stage_totals(recipe: Recipe) -> list[StageTotal]:
    stages = {"sft": recipe.sft, "grpo": recipe.grpo, "dpo": recipe.dpo}
    return [StageTotal(name=name, steps=stage.max_num_steps) for name, stage in stages.items() if stage is not None]
