"""Export the model of a run, or of one of its checkpoints, as a Hugging Face folder, whichever backend wrote it.

The model is built from the run's recipe, unsharded and in this process, and filled from the checkpoint. A checkpoint of
another model is therefore refused by the name of what does not fit.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from rl_backends import DTensorConfig, select_backend
from rl_backends.checkpoints.folders import atomic_folder
from rl_backends.checkpoints.storage import read_manifest
from rl_launcher.build.companions import write_model
from rl_launcher.build.models import load_policy
from rl_launcher.checkpoints.folders import (
    POLICY,
    find_latest,
    folder_name,
    read_checkpoint,
    root_of,
)
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory


def export(run_or_checkpoint: str | Path, to: str | Path, *, step: int | None = None) -> Path:
    """Write the model and tokenizer of a run to a new folder, atomically, and return that folder.

    Args:
        run_or_checkpoint: a run directory, whose trained model is exported, or its newest checkpoint if it did not
            finish; or the folder of one checkpoint.
        to: the new folder; nothing is overwritten.
        step: export the checkpoint after this number of steps over all stages, as in its name.

    Raises:
        Refusal: there is no such checkpoint, it is incomplete or damaged, or `to` exists.
        ValueError: the model that the recipe names cannot be built, or does not match the checkpoint.
    """
    source, target = Path(run_or_checkpoint).expanduser().absolute(), Path(to).expanduser().absolute()
    if target.exists():
        raise Refusal(f"{target} exists already, and nothing is overwritten; choose another folder")
    run, folder = _find_source(source, step)
    with atomic_folder(target) as unfinished:
        if folder == run.model:
            shutil.copytree(folder, unfinished, dirs_exist_ok=True)
        else:
            _convert(load_recipe(run.recipe, schema=Recipe).value, folder / POLICY, unfinished)
    return target


def _find_source(source: Path, step: int | None) -> tuple[RunDirectory, Path]:
    if source.parent.name == "checkpoints" and not (source / "recipe.yaml").exists():
        if step is not None:
            raise Refusal(f"{source} is one checkpoint already; leave out step={step}, or give the run directory")
        return RunDirectory.open(source.parents[1]), read_checkpoint(source).folder
    run = RunDirectory.open(source)
    if step is not None:
        folder = root_of(run) / folder_name(step)
        if not folder.is_dir():
            there = ", ".join(sorted(path.name for path in root_of(run).glob("*step_*"))) or "none"
            raise Refusal(f"{folder} does not exist; checkpoints of this run: {there}")
        return run, read_checkpoint(folder).folder
    if run.model.is_dir():
        return run, run.model
    latest = find_latest(run)
    if latest is None:
        raise Refusal(f"{run.path} has neither a trained model nor a checkpoint to export")
    return run, latest.folder


def _convert(recipe: Recipe, checkpoint: Path, folder: Path) -> None:
    """Fill the recipe's model from a checkpoint, and write it to `folder`."""
    model, tokenizer = load_policy(recipe.policy, seed=recipe.seed)
    # One CPU rank of DTensor reads Megatron's checkpoints too, since those use Hugging Face's names.
    theirs = recipe.policy.dtensor_cfg
    plain = DTensorConfig(
        custom_parallel_plan=theirs.custom_parallel_plan, lora_cfg=select_backend(recipe.policy).adapters
    )
    megatron = replace(recipe.policy.megatron_cfg, enabled=False, lora_cfg=None)
    selection = select_backend(replace(recipe.policy, dtensor_cfg=plain, megatron_cfg=megatron))
    saved = {getattr(torch, dtype.removeprefix("torch.")) for dtype, _ in read_manifest(checkpoint).model.values()}
    floats = [dtype for dtype in saved if dtype.is_floating_point]
    widest = max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
    policy = selection.make(model.to(widest))
    try:
        policy.load_checkpoint(checkpoint, optimizer=False)
        write_model(folder, model=policy, tokenizer=tokenizer)
    finally:
        policy.close()
