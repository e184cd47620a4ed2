"""Write a run's progress and weights as a checkpoint, and find them again. Does not decide when, nor which are kept."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_launcher.checkpointing.files import appearing
from rl_launcher.checkpointing.folders import (
    POLICY,
    STAGE_START,
    Checkpoint,
    CheckpointError,
    folder_name,
    mark_complete,
    read_checkpoint,
    root_of,
)
from rl_launcher.checkpointing.packing import pack, unpack
from rl_launcher.checkpointing.progress import NUMBER_FIELDS, Progress, data_digest
from rl_launcher.observe import RunDirectory
from rl_launcher.parts import Parts

__all__ = ["load_progress", "save_beginning", "save_in_a_step", "save_progress", "stage_start_of"]

NUMBERS, TENSORS = "progress.json", "progress.safetensors"
LOGS = ("metrics.jsonl", "samples.jsonl", "spans.jsonl", "refits.jsonl")
"""Files of a run directory that a resumed run appends to; `events.jsonl` is kept whole, since it all did happen."""


def save_progress(progress: Progress, parts: Parts, run: RunDirectory) -> Checkpoint:
    """Write a checkpoint to go on from; one that is there already is this one, and stays.

    Raises:
        OSError: it cannot be written; every earlier checkpoint is whole. The policy's errors as they are.
    """
    folder = root_of(run) / folder_name(progress.total)
    if folder.exists():
        return read_checkpoint(folder)
    _write(progress, parts, run, folder=folder)
    return read_checkpoint(folder)


def save_in_a_step(progress: Progress, parts: Parts, run: RunDirectory) -> Path:
    """Write the weights of a run that failed in the middle of a batch: to look at, to export, not to go on from."""
    folder = root_of(run) / folder_name(progress.total + 1).replace("step", "in_step")
    _write(progress, parts, run, folder=folder)
    return folder


def _write(progress: Progress, parts: Parts, run: RunDirectory, *, folder: Path) -> None:
    progress.data = progress.data or data_digest(parts)  # of a run that goes on, it has been checked
    progress.cwd = str(Path.cwd())
    progress.logs = _sizes(run)
    state, tensors = pack(progress.keep_state() if progress.keep_state else None, prefix="state")
    with appearing(folder) as unfinished:
        parts.policy.save_checkpoint(unfinished / POLICY)
        save_file(
            {**{f"kept/{name}": value.contiguous() for name, value in progress.tensors.items()}, **tensors},
            unfinished / TENSORS,
        )
        (unfinished / NUMBERS).write_text(json.dumps({**progress.numbers, "state": state}), encoding="utf-8")
        names = (each.name for each in fields(Checkpoint) if each.name != "folder")
        mark_complete(unfinished, {name: getattr(progress, name) for name in names})


def save_beginning(parts: Parts, run: RunDirectory) -> None:
    """Keep the weights that a stage begins with, for a run that is held to them and may have to go on."""
    with appearing(stage_start_of(run)) as unfinished:
        parts.policy.save_checkpoint(unfinished / POLICY)
        mark_complete(unfinished, {})


def stage_start_of(run: RunDirectory) -> Path:
    """Where `save_beginning` writes to."""
    return root_of(run) / STAGE_START


def load_progress(checkpoint: Checkpoint) -> Progress:
    """Where a checkpoint stands.

    Raises:
        CheckpointError: it cannot be read.
    """
    folder = checkpoint.folder
    try:
        tensors = load_file(folder / TENSORS)
        numbers: dict[str, Any] = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
        state = unpack(numbers.pop("state", None), tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be resumed from: {error}") from error
    if set(numbers) != set(NUMBER_FIELDS):
        raise CheckpointError(
            f"{folder / NUMBERS} must have {', '.join(NUMBER_FIELDS)}; it has {', '.join(numbers)}: go on with the "
            f"release of rl-launcher that wrote it"
        )
    kept = {name.removeprefix("kept/"): tensor for name, tensor in tensors.items() if name.startswith("kept/")}
    return Progress(**numbers, tensors=kept, state=state, folder=folder)


def _sizes(run: RunDirectory) -> dict[str, int]:
    """How long the log is, once all of it is on disk."""
    sizes = {}
    for name in LOGS:
        path = run.path / name
        if path.exists():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[name] = path.stat().st_size
    return sizes
