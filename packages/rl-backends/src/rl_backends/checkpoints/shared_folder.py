"""Prove that all ranks see the same folder, by a file that lies in it while they look.

All ranks write their shards into one checkpoint, so without a common folder no node would have a complete one.

    with probe_file(folder) as (path, token):
        require_shared(folder, {"rank 1 on node b": call_rank_1(sees, path, token)})
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def probe_file(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the content of a file in `folder`, which is removed after the block."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)  # a file of the same name on another disk has another content
    path = folder / f".shared-{token[:8]}"
    path.write_text(token, encoding="utf-8")
    try:
        yield str(path), token
    finally:
        path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def sees(path: str, token: str) -> bool:
    """Return whether the calling process can read that file; to be called on every rank."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:  # absent or unreadable
        return False


def require_shared(folder: Path, seen: Mapping[str, bool]) -> None:
    """Refuse a folder that not every rank sees; `seen` has the result of `sees` by rank.

    Raises:
        ValueError: with the ranks that do not see it, and the remedy.
    """
    if blind := [rank for rank, sees_it in seen.items() if not sees_it]:
        raise ValueError(
            f"{folder.absolute()} is not the same folder for {', '.join(blind)}: all ranks write checkpoints, and read "
            f"them when the run is resumed; choose a folder that every node mounts at the same path (in a recipe, "
            f"run_dir)"
        )
