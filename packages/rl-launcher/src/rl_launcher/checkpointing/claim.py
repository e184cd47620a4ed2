"""One process at a time carries a run: a claim on its directory that ends with the process, however that ends.

Two that resume one run would write into one log and remove each other's checkpoints.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_launcher.errors import LauncherError
from rl_launcher.observe import RunDirectory

__all__ = ["claimed"]

NAME = ".claimed"


@contextmanager
def claimed(run: RunDirectory, *, new: bool = False) -> Iterator[None]:
    """Hold the claim in the block.

    Args:
        run: whose.
        new: nothing but the claim may be in its folder.

    Raises:
        LauncherError: another process holds it; on which machine, and which, is told. Or a new run's folder was filled
            since it was found empty.
    """
    path = run.path / NAME
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LauncherError(
                f"{run.path} is being carried on already, by {_holder(path)}; end that first"
            ) from error
        except OSError:  # a file system without locks, as some that are mounted over a network
            _refuse_what_is_there(run, new=new)
            yield
            return
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}")
            file.flush()
            _refuse_what_is_there(run, new=new)
            yield
        finally:
            path.unlink(missing_ok=True)


def _refuse_what_is_there(run: RunDirectory, *, new: bool) -> None:
    if new and (names := sorted(entry.name for entry in run.path.iterdir() if entry.name != NAME)):
        raise LauncherError(
            f"{run.path} is the folder of another run since a moment ago (it holds {', '.join(names[:3])}): two were "
            f"started at once; choose another run_dir"
        )


def _holder(path: Path) -> str:
    return path.read_text(encoding="utf-8") or "a process that has just begun"
