"""One run, from a resolved recipe to a run directory that says all about it; and an interrupted one, to its end.

Whatever ends a run early, a signal or an error, first saves where it stands, and leaves a report of what there is.
"""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rl_launcher.building import Parts, build
from rl_launcher.errors import LauncherError, RunStoppedError
from rl_launcher.interruption import Interruption
from rl_launcher.observe import LiveView, MetricsLog, RunDirectory, StageTotal, collect_versions, write_report
from rl_launcher.progress import Progress, load_progress, save_model, save_progress
from rl_launcher.recipe import Resolved, load_recipe
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.summary import summarize
from rl_launcher.training import headline_stage, train

__all__ = ["resume", "run"]


def run(resolved: Resolved[Recipe]) -> dict[str, Any]:
    """Carry out a recipe; return the summary that is also in `summary.json`.

    Raises:
        ValueError: the recipe's parts refuse before training; nothing is left behind.
        RunStoppedError: training ended early; the run directory holds what was reached.
    """
    started = time.perf_counter()
    _refuse_several_ranks()
    directory = RunDirectory.create(resolved.value.run_dir)
    try:
        parts = _build(resolved.value)
        directory.recipe.write_text(resolved.to_yaml(), encoding="utf-8")
        directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")
    except BaseException:
        directory.discard()  # nothing was trained, so nothing is lost
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
    parts = _build(replace(recipe, policy=here))
    progress.check(parts)
    return _carry_out(recipe, directory, parts, progress=progress, started=started)


def _refuse_several_ranks() -> None:
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks not in {"", "1"}:
        raise LauncherError(
            f"rl-launcher trains in one process, and WORLD_SIZE={ranks}; start it without torchrun (rl_backends trains "
            f"over several ranks, from a loop of your own)"
        )


def _build(recipe: Recipe) -> Parts:
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would run through the live view
    return build(recipe)


def _carry_out(
    recipe: Recipe, directory: RunDirectory, parts: Parts, *, progress: Progress, started: float
) -> dict[str, Any]:
    after: dict[str, float] | None = None
    stopped: RunStoppedError | None = None
    with Interruption() as interruption:
        try:
            with MetricsLog(directory, elapsed_s=progress.wall_s) as log, LiveView(*_view_of(recipe)) as view:
                recorder = Recorder(log, view, parts=parts, progress=progress, interruption=interruption)
                after = train(recipe, parts, recorder, progress=progress).metrics()
            interruption.hold()
            save_model(parts, directory.model)
            shutil.rmtree(directory.interrupted, ignore_errors=True)
            progress.wall_s += time.perf_counter() - started
        except BaseException as error:  # noqa: BLE001 - becomes a RunStoppedError, once what there is has been saved
            interruption.hold()
            progress.wall_s += time.perf_counter() - started
            after = None
            exact = not interruption.in_a_step and progress.version == parts.policy.version
            stopped = _stopped(error, directory, parts, progress=progress, exact=exact)
        summary = summarize(recipe, parts, directory, progress=progress, after=after)
        unwritten = _conclude(directory, summary)
    if stopped is not None:
        stopped.args = ("\n".join([str(stopped), *unwritten]),)
        raise stopped
    return {**summary, "unwritten": unwritten} if unwritten else summary


def _conclude(directory: RunDirectory, summary: dict[str, Any]) -> list[str]:
    """Write summary and report; what cannot be written is told, and takes nothing from the result."""
    unwritten = []
    for write in (
        lambda: directory.summary.write_text(json.dumps(summary, indent=2), encoding="utf-8"),
        lambda: write_report(directory),
    ):
        try:
            write()
        except (OSError, ValueError) as error:
            unwritten.append(str(error))
    return unwritten


def _stopped(
    error: BaseException, directory: RunDirectory, parts: Parts, *, progress: Progress, exact: bool
) -> RunStoppedError:
    """Save where the run stands, and say how to go on, or that nothing could be saved."""
    try:
        save_progress(progress, parts, directory, exact=exact)
    except Exception as second:  # noqa: BLE001 - the first cause is what the user must hear
        rest = f"The weights could NOT be saved: {second}"
    else:
        way_on = (
            f"rl-launcher resume {directory.path}"
            if exact
            else f"policy.model_name={directory.interrupted} sft=null run_dir=<another>"
        )
        rest = (
            f"Saved after {parts.policy.version} optimizer steps; weights, log and report are in {directory.path}. "
            f"Go on with: {way_on}"
        )
    stopped = RunStoppedError(f"{_cause(error)}\n{rest}", interrupted=isinstance(error, KeyboardInterrupt))
    stopped.__cause__ = error
    return stopped


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"stopped: {error}" if isinstance(error, ValueError | RuntimeError) else f"failed: {error!r}"


def _view_of(recipe: Recipe) -> tuple[str, list[StageTotal]]:
    stages = {"sft": recipe.sft, "grpo": recipe.grpo, "dpo": recipe.dpo}
    totals = [StageTotal(name=name, steps=stage.max_num_steps) for name, stage in stages.items() if stage is not None]
    return f"{headline_stage(recipe)} · {recipe.data.source} · {recipe.policy.model_name}", totals
