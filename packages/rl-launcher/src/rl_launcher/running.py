"""One run, from a resolved recipe to a run directory that says all about it; and an interrupted one, to its end.

Whatever ends a run early, a signal or an error, first saves where it stands, and leaves a report of what there is.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from rl_launcher import preflight
from rl_launcher.building import build
from rl_launcher.checkpointing.changes import changed_keys, check_changes
from rl_launcher.checkpointing.claim import claimed
from rl_launcher.checkpointing.files import write_text
from rl_launcher.errors import LauncherError, RunStoppedError
from rl_launcher.interruption import Interruption
from rl_launcher.observe import RunDirectory, check_trackers, collect_versions, redact, redacted_keys, write_origins
from rl_launcher.parts import Parts
from rl_launcher.recipe import Resolved, load_recipe
from rl_launcher.recipe.interpolation import escape
from rl_launcher.recipe.plain_data import to_plain
from rl_launcher.recipe.yaml_dialect import dump
from rl_launcher.recipe_schema import Recipe
from rl_launcher.supervising import Run, find_resumption, has_begun, supervise

__all__ = ["resume", "run"]


def run(resolved: Resolved[Recipe]) -> dict[str, Any]:
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
    build_here = partial(_build, run_dir=directory.path)
    # Discarded within the claim: a folder that another process has claimed, or filled meanwhile, is not ours to remove.
    with Interruption() as interruption, claimed(directory, new=True), _discarded_if_refused(directory):
        parts = build_here(recipe)
        with _closed_if_refused(parts):
            _describe(resolved, directory)
        job = Run(recipe=recipe, directory=directory, build=build_here, started=started)
        return supervise(job, parts, interruption=interruption)


def resume(run_dir: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
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
    build_here = partial(_build, run_dir=directory.path)
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
        raise LauncherError(
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
        raise LauncherError(
            f"rl-launcher is one process that starts all others, and WORLD_SIZE={ranks}; start it without torchrun, "
            f"with cluster.runtime=ray for several ranks"
        )


def _build(recipe: Recipe, *, run_dir: Path) -> Parts:
    if recipe.cpu_threads is not None:
        torch.set_num_threads(recipe.cpu_threads)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, whose bars would run through the live view
    return build(recipe, run_dir=run_dir)


def _describe(resolved: Resolved[Recipe], directory: RunDirectory) -> None:
    """Write down what the run is, credentials left out."""
    write_text(directory.recipe, _recipe_text(resolved))
    write_origins(directory, resolved.origins, recipe=to_plain(resolved.value))
    directory.versions.write_text(json.dumps(collect_versions(), indent=2), encoding="utf-8")


def _recipe_text(resolved: Resolved[Recipe]) -> str:
    return dump(escape(redact(to_plain(resolved.value))))
