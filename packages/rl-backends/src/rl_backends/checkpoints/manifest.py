"""The files of a checkpoint and its marker, which says what must be in the folder and what model and mesh wrote it.

    <folder>/rank-00000-of-00002.safetensors    boxes of tensors: key `<tensor>@<offset>,<offset>`
    <folder>/tensors.json                       dtype, shape and boxes of each tensor, and the file of each box
    <folder>/state.json                         everything that is not a tensor
    <folder>/checkpoint.json                    the marker

A folder is a checkpoint if it has the marker, which is written last and appears with the folder, by one rename. It
holds the size and SHA-256 of every other file, and the SHA-256 of its own text.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_backends.checkpoints.folders import Record, read_marker, write_marker
from rl_backends.errors import CheckpointError

MARKER, INDEX, STATE = "checkpoint.json", "tensors.json", "state.json"
FORMAT = ("rl-backends checkpoint", 2)

DAMAGED = "restore it from a copy, or resume from another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of the marker."""

    version: int
    """Optimizer steps that the weights have seen."""
    mesh: dict[str, Any]
    """`ranks`, and the `axes` with their sizes."""
    model: dict[str, list[Any]]
    """Fingerprint: name -> [dtype, shape] of every parameter and persistent buffer."""
    torch: str = str(torch.__version__)
    """Release of torch that wrote it."""
    written_at_ns: int = 0
    """When the checkpoint was completed, in nanoseconds since 1970."""
    files: dict[str, Record] = field(default_factory=dict)
    """All other files of the folder."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a folder as a complete checkpoint."""
    write_marker(folder / MARKER, asdict(manifest), format=FORMAT, files=manifest.files)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint of this format; its files are not looked at."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint; find_latest(parent) names the newest complete one")
    body = read_marker(folder / MARKER, format=FORMAT, remedy=DAMAGED, check=False)
    del body["format"], body["format_version"]
    try:
        return Manifest(**body)
    except TypeError as error:
        raise CheckpointError(f"{folder / MARKER} is damaged: {error}; {DAMAGED}") from error


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; {DAMAGED}") from error


def check_model(folder: Path, saved: Mapping[str, list[Any]], here: Mapping[str, list[Any]]) -> None:
    """Check that the checkpoint is of this model: names, shapes and dtypes."""
    if saved == here:
        return
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in here]
    differences += [f"{name} is only in this model" for name in here if name not in saved]
    differences += [
        f"{name} is {' '.join(map(str, saved[name]))} in the checkpoint and {' '.join(map(str, here[name]))} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    raise CheckpointError(
        f"{folder}: a checkpoint of another model: {'; '.join(differences[:3])}{more}. Build the model that wrote "
        f"it, in the same dtype, or choose another checkpoint"
    )
