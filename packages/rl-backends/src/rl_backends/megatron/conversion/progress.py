"""A line now and then on how far writing is, told by the size of what lies in a folder."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rl_backends.megatron.conversion.space import told_bytes

__all__ = ["told_while_writing"]

EVERY_S = 10.0


@contextlib.contextmanager
def told_while_writing(folder: Path, *, total_bytes: int, say: Callable[[str], None]) -> Iterator[None]:
    """Say every ten seconds how much of `total_bytes` lies in `folder`."""
    ended = threading.Event()
    started = time.monotonic()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            done = sum(_size(path) for path in folder.rglob("*"))
            seconds = time.monotonic() - started
            say(f"written {told_bytes(done)} of {told_bytes(total_bytes)} in {seconds:.0f} s")

    thread = threading.Thread(target=watch, name="conversion progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
