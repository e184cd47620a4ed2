"""Whether all processes of a run see the folder that its checkpoints go to. Knows no Ray: who calls them is told.

Every rank writes its shards there, and one process gives the folder its name: where the nodes have no folder in common,
a checkpoint would be whole on none of them.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rl_launcher.errors import LauncherError

__all__ = ["SharedFolder", "sees"]


class SharedFolder:
    """A context in which one file lies in `folder` for the others to find.

    with SharedFolder(folder) as probe:
        probe.require({"rank 1 on node b": ask_rank_1(sees, probe.path, probe.token)})
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.token = secrets.token_hex(16)
        """What the file says: one of the same name on another disk says something else."""
        self.path = str(self._folder / f".shared-{self.token[:8]}")
        """Of the file."""

    def require(self, seen: Mapping[str, bool]) -> None:
        """Refuse a folder that somebody does not see.

        Raises:
            LauncherError: naming who does not, and what to do.
        """
        if blind := [who for who, sees_it in seen.items() if not sees_it]:
            raise LauncherError(
                f"{self._folder} is not the same folder for {', '.join(blind)}: checkpoints are written by all ranks, "
                f"and read by all when the run goes on; set run_dir to a folder that every node mounts at "
                f"the same place"
            )

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        Path(self.path).write_text(self.token, encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Path(self.path).unlink(missing_ok=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()


def sees(path: str, token: str) -> bool:
    """Whether the process that calls this sees the file; to be called on every rank."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:  # absent, or not to be read: not seen either way
        return False
