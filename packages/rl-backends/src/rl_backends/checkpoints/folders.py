"""Which checkpoints a folder holds, and which of them may go. Reads markers, never tensors."""

import shutil
from pathlib import Path

from rl_backends.checkpoints.manifest import MARKER, Manifest, read_manifest
from rl_backends.checkpoints.together import on_all, on_first
from rl_backends.checkpoints.writing import idle_group, unfinished_name
from rl_backends.errors import CheckpointError

__all__ = ["find_latest", "prune"]


def find_latest(parent: str | Path) -> Path | None:
    """The checkpoint in `parent` that was completed last; None where there is none.

    By when it was written and not by its version: a run that went back to step 5 goes on from its own step 6.
    Folders without a marker do not count; a marker that cannot be read is an error and never skipped, since that
    checkpoint might be the newest. Not a collective: let one rank ask, or all after `CheckpointWrite.wait`.

    Raises:
        CheckpointError: a marker is damaged or of an unknown format: which one is newest cannot be told.
    """
    found = _complete(Path(parent))
    return found[-1] if found else None


def prune(parent: str | Path, *, keep: int) -> list[Path]:
    """Remove all complete checkpoints in `parent` but the `keep` newest; every rank must call it.

    One that is being removed has no name of a checkpoint any more, so that a kill half-way leaves no torn one.

    Returns:
        What was removed.

    Raises:
        ValueError: keep < 1.
        CheckpointError: on every rank: a marker is damaged, or a folder cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be >= 1, or nothing is left to resume from")
    group = idle_group()
    old = on_all(lambda: _complete(Path(parent))[:-keep], group=group)
    on_first(lambda: _remove(old), group=group)
    return old


def _complete(parent: Path) -> list[Path]:
    """Oldest first."""
    folders = [marker.parent for marker in parent.glob(f"*/{MARKER}") if not marker.parent.name.startswith(".")]

    def written(folder: Path) -> tuple[int, int, str]:
        try:
            manifest: Manifest = read_manifest(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Which checkpoint of {parent} is the newest cannot be told: move {folder.name} elsewhere"
            ) from error
        return manifest.written_at_ns, manifest.version, folder.name

    return sorted(folders, key=written)


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        doomed = folder.with_name(unfinished_name(folder))
        try:
            folder.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be removed: {error}") from error
