"""One writer at a time for one name in a folder that jobs and nodes share.

The lock is the kernel's (`flock`): it goes with the process that holds it, however that ends. The file that carries it
stays, and says who holds it. Over NFS the server keeps it, for all nodes.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

from rl_backends.errors import CheckpointError

__all__ = ["WriterLock", "lock_file"]

SIGNED_S = 2.0
UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def lock_file(target: Path) -> Path:
    """The file that carries the lock of a target, beside it."""
    return target.with_name(f".{target.name}.lock")


@final
class WriterLock:
    """Whoever holds it may write the target."""

    def __init__(self, target: Path) -> None:
        self._path = lock_file(target)
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Take it if nobody has it; the folder of the target must exist.

        Raises:
            CheckpointError: the filesystem has no locks.
            OSError: the file of the lock cannot be made.
        """
        assert self._descriptor is None
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            if error.errno in UNSUPPORTED:
                raise CheckpointError(
                    f"{self._path.parent} is on a filesystem without locks ({error}), so two jobs could write one "
                    f"conversion at once: mount it with flock, or choose another folder"
                ) from error
            raise
        self._descriptor = descriptor
        self._sign(descriptor)
        return True

    def release(self) -> None:
        """Give it back, if this one has it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children share the descriptor: closing is not enough
            os.close(descriptor)

    def holder(self) -> str:
        """Who has it, in words."""
        until = time.monotonic() + SIGNED_S
        while time.monotonic() < until:
            try:
                told = json.loads(self._path.read_text(encoding="utf-8"))
                since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told["since"]))
                return f"process {told['pid']} on {told['host']}, since {since}"
            except (OSError, ValueError, KeyError, TypeError):
                time.sleep(SIGNED_S / 20)  # between taking it and saying who did
        return "a process that does not say who it is"

    @contextlib.contextmanager
    def held_if_free(self) -> Iterator[bool]:
        """Whether it was free, and so is this one's inside the context."""
        acquired = self.try_acquire()
        try:
            yield acquired
        finally:
            self.release()

    @staticmethod
    def _sign(descriptor: int) -> None:
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
