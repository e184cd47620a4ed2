"""The memory of slots, and how other processes of the host map it: shared memory, or GPU memory over CUDA IPC.

Shared memory is a file without a name, mapped by each process. The file is made in memory (`/dev/shm`), readable by its
owner alone, and has lost its name before it has a page; other processes get it through a socket (SCM_RIGHTS). So
whatever kills the processes, the memory goes with the last of them. Its pages are allocated and touched at once: a full
file system is an error here, not a SIGBUS later.

A GPU buffer is exported once to each reader, which opens it once: handles per tensor and per refit are what makes CUDA
IPC slow and leak elsewhere.
"""

from __future__ import annotations

import base64
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from rl_refit import gpu
from rl_refit.errors import RefitError
from rl_refit.transports.links import Handle

__all__ = ["SHARED_MEMORY", "Ring", "Segment", "close_descriptors"]

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


def _no_room(directory: str, nbytes: int) -> str:
    state = os.statvfs(directory)
    return (
        f"shared memory of {nbytes:,} bytes does not fit into {directory}, which has "
        f"{state.f_bavail * state.f_frsize:,} bytes available of {state.f_blocks * state.f_frsize:,}; give it more "
        f"(docker run --shm-size=…, in Kubernetes an emptyDir of medium Memory), or name another directory=, "
        f"or use a ring of smaller or fewer slots"
    )


@final
class Ring:
    """Slots of given sizes, one after the other, as one process sees them.

    Args:
        data: uint8 [the sum of `sizes`], and whatever keeps it alive.
        sizes: Bytes of each slot.
        segment: Where `data` is shared memory.
    """

    def __init__(self, data: Tensor, sizes: Sequence[int], *, segment: Segment | None = None) -> None:
        self.segment = segment
        self._slots = data.split_with_sizes(list(sizes)) if sizes else ()

    @classmethod
    def create(
        cls, sizes: Sequence[int], *, on_gpu: bool, device: torch.device, num_readers: int, directory: str
    ) -> tuple[Ring, list[Handle]]:
        """New slots, and for each process that is to map them a handle; `close_descriptors` afterwards.

        Raises:
            RefitError: There is no room for them, or GPU memory of this process cannot be exported.
        """
        nbytes = sum(sizes)
        if not num_readers:
            return cls(gpu.empty(nbytes, device if on_gpu else torch.device("cpu")), sizes), []
        if not on_gpu:
            segment, descriptor = Segment.create(directory, nbytes)
            handles = [Handle({"sizes": [*sizes]}, (descriptor,))] * num_readers
            return cls(segment.bytes, sizes, segment=segment), handles
        _require_exportable()
        data, uuid = gpu.empty(nbytes, device), gpu.uuids()[gpu.index_of(device)]
        handles = [
            Handle({"sizes": [*sizes], "gpu": uuid, "cuda": _to_plain(gpu.export(data))}) for _ in range(num_readers)
        ]
        return cls(data, sizes), handles

    @classmethod
    def attach(cls, handle: Handle) -> Ring:
        """The slots of another process."""
        sizes = handle.description["sizes"]
        if "cuda" not in handle.description:
            segment = Segment(handle.descriptors[0], sum(sizes))
            return cls(segment.bytes, sizes, segment=segment)
        owner = torch.device("cuda", gpu.uuids().index(handle.description["gpu"]))
        return cls(gpu.import_exported(_from_plain(handle.description["cuda"]), owner), sizes)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, number: int) -> Tensor:
        return self._slots[number]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)


def close_descriptors(handles: Iterable[Handle]) -> None:
    """Close what handles of shared memory keep open; the mappings stay."""
    for descriptor in {descriptor for handle in handles for descriptor in handle.descriptors}:
        os.close(descriptor)


def _require_exportable() -> None:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(variable, "")
        if "expandable_segments:true" in setting.lower().replace(" ", ""):
            raise RefitError(
                f"{variable}={setting!r}: memory of expandable segments is shared slowly, and in containers often not "
                f"at all; leave expandable_segments out in the processes that refit",
                phase="prepare",
            )


def _to_plain(export: Sequence[Any]) -> list[Any]:
    """What torch exports, as JSON can say it: bytes become {"base64": …}."""
    return [{"base64": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in export]


def _from_plain(plain: Sequence[Any]) -> list[Any]:
    return [base64.b64decode(x["base64"]) if isinstance(x, dict) else x for x in plain]
