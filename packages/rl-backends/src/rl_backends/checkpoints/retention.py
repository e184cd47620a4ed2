"""Which checkpoints a folder holds, and which of them may be removed."""

import shutil
from pathlib import Path

from rl_backends.checkpoints.manifest import MARKER, read_manifest
from rl_backends.checkpoints.saving import idle_group, other_ranks_failures, unfinished_name
from rl_backends.errors import CheckpointError
from rl_backends.rank_agreement import on_every_rank, on_rank_0


def find_latest(parent: str | Path) -> Path | None:
    """The checkpoint in `parent` that was completed last, or None if there is none.

    The order is that of the time of writing, not of the versions: a run that went back to step 5 continues from its
    own step 6. Folders without a marker do not count; a marker that cannot be read is an error and never skipped,
    since that checkpoint might be the newest. Not a collective: let one rank ask, or all after `CheckpointWrite.wait`.

    Raises:
        CheckpointError: a marker is damaged or of an unknown format, so that the newest one is not known.
    """
    found = _complete(Path(parent))
    return found[-1] if found else None


@other_ranks_failures()
def prune(parent: str | Path, *, keep: int) -> list[Path]:
    """Remove all complete checkpoints in `parent` but the `keep` newest; every rank must call it.

    A checkpoint is renamed before it is removed, so that a kill half-way leaves no torn one.

    Returns:
        What was removed.

    Raises:
        ValueError: keep < 1.
        CheckpointError: on every rank: a marker is damaged, or a folder cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} must be >= 1, or nothing is left to resume from")
    group = idle_group()
    old = on_every_rank(lambda: _complete(Path(parent))[:-keep], group=group)

    def remove() -> None:
        for folder in old:
            doomed = folder.with_name(unfinished_name(folder))
            try:
                folder.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be removed: {error}") from error

    on_rank_0(remove, group=group)
    return old


def _complete(parent: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found: list[tuple[int, int, str, Path]] = []
    for marker in parent.glob(f"*/{MARKER}"):
        folder = marker.parent
        if folder.name.startswith("."):
            continue
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Which checkpoint of {parent} is the newest cannot be told: move {folder.name} elsewhere"
            ) from error
        found.append((manifest.written_at_ns, manifest.version, folder.name, folder))
    return [folder for *_, folder in sorted(found)]
