"""A Hugging Face folder of a run's model, or of one of its checkpoints, whichever backend wrote that. Trains nothing.

The model is built as the recipe says, in this process and unsharded, and filled from the checkpoint: its sizes and its
tokenizer are then those of the run, and what does not fit is refused by name.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_backends import DTensorConfig, select_backend
from rl_launcher.checkpoints.folders import (
    POLICY,
    CheckpointError,
    appearing,
    find_latest,
    folder_name,
    read_checkpoint,
    root_of,
)
from rl_launcher.errors import Refusal
from rl_launcher.load_model import load_policy
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import PolicyConfig, Recipe
from rl_observe import RunDirectory

__all__ = ["export", "fill_folder"]


class Saveable(Protocol):
    """A policy."""

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder that is not there yet."""


def export(run_or_checkpoint: str | Path, to: str | Path, *, step: int | None = None) -> Path:
    """Write model and tokenizer of a run into a new folder, whole or not at all; return it.

    Args:
        run_or_checkpoint: a run directory, of which the trained model is taken, or of an unfinished run the newest
            checkpoint; or the folder of one checkpoint.
        to: the folder to be; nothing is overwritten.
        step: take the checkpoint after so many steps over all stages, as in its name.

    Raises:
        Refusal: there is no such checkpoint, it is torn or damaged, or something is at `to`.
        ValueError: the model that the recipe names cannot be built, or is another.
    """
    source, target = Path(run_or_checkpoint).expanduser().absolute(), Path(to).expanduser().absolute()
    if target.exists():
        raise Refusal(f"{target} exists already, and nothing is overwritten; choose another folder")
    run, folder = _found(source, step)
    with appearing(target) as unfinished:
        if folder == run.model:
            shutil.copytree(folder, unfinished, dirs_exist_ok=True)
        else:
            _write(load_recipe(run.recipe, schema=Recipe).value, folder / POLICY, unfinished)
    return target


def _found(source: Path, step: int | None) -> tuple[RunDirectory, Path]:
    if source.parent.name == "checkpoints" and not (source / "recipe.yaml").exists():
        if step is not None:
            raise Refusal(f"{source} is one checkpoint already; leave out step={step}, or give the run")
        return RunDirectory.open(source.parents[1]), read_checkpoint(source).folder
    run = RunDirectory.open(source)
    if step is not None:
        folder = root_of(run) / folder_name(step)
        if not folder.is_dir():
            there = ", ".join(sorted(path.name for path in root_of(run).glob("*step_*"))) or "none"
            raise Refusal(f"{folder} is not there; checkpoints of this run: {there}")
        return run, read_checkpoint(folder).folder
    if run.model.is_dir():
        return run, run.model
    latest = find_latest(run)
    if latest is None:
        raise Refusal(f"{run.path} has neither a trained model nor a checkpoint to export")
    return run, latest.folder


def _write(recipe: Recipe, checkpoint: Path, folder: Path) -> None:
    model, tokenizer = load_policy(recipe.policy, seed=recipe.seed)
    policy = select_backend(_unsharded(recipe.policy)).make(model.to(_dtype_of(checkpoint)))
    try:
        policy.load_checkpoint(checkpoint, optimizer=False)
        fill_folder(folder, policy=policy, tokenizer=tokenizer)
    finally:
        policy.close()


def fill_folder(folder: Path, *, policy: Saveable, tokenizer: Any) -> None:
    """Write model and tokenizer into a folder that is there and empty."""
    weights = folder / "weights"  # which the policy makes itself
    policy.save_pretrained(weights)
    for path in weights.iterdir():
        path.rename(folder / path.name)
    weights.rmdir()
    tokenizer.save_pretrained(folder)


def _unsharded(config: PolicyConfig) -> PolicyConfig:
    """The policy on one rank of the CPU. Megatron's checkpoints have Hugging Face's names, so DTensor reads them."""
    megatron = replace(config.megatron_cfg, enabled=False)
    theirs = config.dtensor_cfg
    plain = DTensorConfig(custom_parallel_plan=theirs.custom_parallel_plan, lora_cfg=theirs.lora_cfg)
    return replace(config, dtensor_cfg=plain, megatron_cfg=megatron)


def _dtype_of(checkpoint: Path) -> torch.dtype:
    """The dtype in which the weights were saved; the widest, where there are several."""
    try:
        told = json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))["model"].values()
        dtypes = {getattr(torch, str(dtype).removeprefix("torch.")) for dtype, _ in told}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: {error}; export another checkpoint") from error
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
