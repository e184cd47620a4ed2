"""One run, from a resolved recipe to a run directory that says all about it; and an interrupted one, to its end.

Whatever ends a run early, a signal or an error, first saves where it stands, and leaves a report of what there is.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rl_launcher.building import Parts, build
from rl_launcher.errors import LauncherError
from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, MetricsLog, RunDirectory, StageTotal, collect_versions, write_report
from rl_launcher.progress import Progress, load_progress, save_progress
from rl_launcher.recipe import Resolved, load_recipe
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.summary import summarize
from rl_launcher.training import headline_stage, train

__all__ = ["RunStoppedError", "resume", "run"]


class RunStoppedError(LauncherError):
    """A run that ended early; `interrupted` says whether a person or a signal ended it, and the cause is chained."""

    def __init__(self, message: str, *, interrupted: bool) -> None:
        super().__init__(message)
        self.interrupted = interrupted


def run(resolved: Resolved[Recipe]) -> dict[str, Any]:
    """Carry out a recipe; return the summary that is also in `summary.json`.

    Raises:
        ValueError: the recipe's parts refuse before training; nothing is left behind.
        RunStoppedError: training ended early; the run directory holds what was reached.
    """
    started = time.perf_counter()
    directory = RunDirectory.create(resolved.value.run_dir)
    try:
        parts = _build(resolved.value)
        directory.recipe.write_text(resolved.to_yaml(), encoding="utf-8")
        directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")
    except BaseException:
        shutil.rmtree(directory.path, ignore_errors=True)  # nothing was trained, so nothing is lost
        raise
    return _carry_out(resolved.value, directory, parts, progress=Progress(), started=started)


def resume(run_dir: str | Path) -> dict[str, Any]:
    """Carry an interrupted run to its end; on a CPU, bit for bit as if it had not been interrupted.

    Raises:
        ValueError: there is nothing to resume, or a part refuses; the run directory stays as it was.
        RunStoppedError: it ended early again.
    """
    started = time.perf_counter()
    directory = RunDirectory.open(run_dir)
    progress = load_progress(directory)
    recipe = load_recipe(directory.recipe, schema=Recipe).value
    here = replace(recipe.policy, model_name=str(directory.interrupted), revision=None)
    return _carry_out(recipe, directory, _build(replace(recipe, policy=here)), progress=progress, started=started)


def _build(recipe: Recipe) -> Parts:
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would run through the live view
    return build(recipe)


def _carry_out(
    recipe: Recipe, directory: RunDirectory, parts: Parts, *, progress: Progress, started: float
) -> dict[str, Any]:
    after = None
    with Interruption() as interruption:
        try:
            with (
                MetricsLog(directory, elapsed_s=progress.wall_s) as log,
                LiveView(_title(recipe), _stage_totals(recipe)) as view,
            ):
                recorder = Recorder(log, view, parts=parts, progress=progress, interruption=interruption)
                after = train(recipe, parts, recorder, progress=progress).metrics()
            interruption.hold()
            progress.wall_s += time.perf_counter() - started
            parts.policy.save_pretrained(directory.model)
            parts.tokenizer.save_pretrained(directory.model)
            shutil.rmtree(directory.interrupted, ignore_errors=True)
        except BaseException as error:
            interruption.hold()
            progress.wall_s += time.perf_counter() - started
            raise _stopped(error, directory, parts, progress=progress) from error
        finally:
            summary = summarize(recipe, parts, directory, progress=progress, after=after)
            directory.summary.write_text(json.dumps(summary, indent=2), encoding="utf-8")
            write_report(directory)
    return summary


def _stopped(error: BaseException, directory: RunDirectory, parts: Parts, *, progress: Progress) -> RunStoppedError:
    """Save where the run stands, and say how to go on."""
    save_progress(progress, parts, directory)
    way_on = (
        f"rl-launcher resume {directory.path}"
        if progress.is_exact(parts)
        else f"policy.model_name={directory.interrupted} sft=null run_dir=<another>"
    )
    return RunStoppedError(
        f"{_cause(error)}\n"
        f"Saved after {parts.policy.version} optimizer steps; weights, log and report are in {directory.path}. "
        f"Go on with: {way_on}",
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
