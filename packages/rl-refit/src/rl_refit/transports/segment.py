"""Memory that processes of one host share: a file without a name, mapped by each of them.

The file is made in memory (`/dev/shm`), readable by its owner alone, and has lost its name before it has a page; other
processes get it through a socket (SCM_RIGHTS). So whatever kills the processes, the memory goes with the last of them.
Its pages are allocated and touched at once: a full file system is an error here, not a SIGBUS later.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from typing import final

import torch
from torch import Tensor

from rl_refit.errors import RefitError

__all__ = ["SHARED_MEMORY", "Segment"]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - files in it are made without a name, directories for their owner alone
"""Linux's file system for it."""


@final
class Segment:
    """`nbytes` of shared memory as `bytes`, uint8 [nbytes].

    Lives as long as any tensor of it.

    Args:
        descriptor: Of the open file; it may be closed afterwards.
        nbytes: Size of the file.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._mapped = mmap.mmap(descriptor, nbytes)
        self.bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        int(self.bytes[:: mmap.PAGESIZE].sum())  # maps every page, which the first transfer would pay for otherwise

    @classmethod
    def create(cls, directory: str, nbytes: int) -> tuple[Segment, int]:
        """A new segment of zeros in `directory`, and the descriptor of its file, which the caller closes.

        Raises:
            RefitError: The file system has no room for it.
        """
        with tempfile.TemporaryFile(dir=directory) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                    raise
                raise RefitError(_no_room(directory, nbytes), phase="prepare") from error
            descriptor = os.dup(file.fileno())
        segment = cls(descriptor, nbytes)
        segment.bytes[:: mmap.PAGESIZE] = 0
        return segment, descriptor

    def with_own_storage(self, view: Tensor) -> Tensor:
        """The memory of `view`, a contiguous part of the segment, as a tensor whose storage is just this part.

        So that whoever saves or inspects the tensor meets its bytes, and not the whole segment.
        """
        return torch.frombuffer(
            self._mapped, dtype=view.dtype, count=view.numel(), offset=view.data_ptr() - self.bytes.data_ptr()
        ).view(view.shape)

    def fence(self) -> None:
        """Copies to and from the host's memory are over when they return."""


def _no_room(directory: str, nbytes: int) -> str:
    state = os.statvfs(directory)
    return (
        f"shared memory of {nbytes:,} bytes does not fit into {directory}, which has "
        f"{state.f_bavail * state.f_frsize:,} bytes available of {state.f_blocks * state.f_frsize:,}; give it more "
        f"(docker run --shm-size=…, in Kubernetes an emptyDir of medium Memory), or name another directory=, "
        f"or use a ring of smaller or fewer slots"
    )
