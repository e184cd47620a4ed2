"""Packed buffers on a GPU that processes of one host share (CUDA IPC): the ring of `ring.py` in device memory.

Each source rank makes one buffer, exports it once to each sink rank, and each opens it once: handles per tensor and per
refit are what makes this way slow and leak elsewhere. Copies are awaited before each token, so a slot that a token
names is whole.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from rl_refit.errors import RefitError
from rl_refit.schedule import Routing
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.ring import Memory, Ring
from rl_refit.transports.same_host import Handle
from rl_refit.transports.segment import SHARED_MEMORY

__all__ = ["CudaIpc"]


@final
class CudaIpc:
    """A ring of slots in GPU memory, between processes of one host whose GPUs reach each other.

    Args:
        directory: Where the processes' sockets are while they meet; needs no room.
    """

    name = "CUDA IPC"
    routing: Routing = "unicast"
    bounded = True

    def __init__(self, *, directory: str = SHARED_MEMORY) -> None:
        self._ring = Ring(_DeviceMemory(), directory=directory, stays=False)

    @property
    def extra_bytes(self) -> int:
        """Bytes of this process's ring; 0 where it is no source, since it only maps the rings of others."""
        return self._ring.nbytes

    def open(self, channel: Channel, watch: Watch) -> None:
        """Allocate the ring, export it and introduce the processes to each other.

        Raises:
            RefitError: The tensors are not on a CUDA device, the allocator uses expandable segments, or a peer is on
                another host, on a GPU out of reach, or does not answer.
        """
        _require_cuda(channel.device)
        self._ring.open(channel, watch)

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams through the rings.

        Raises:
            RefitError: A peer is gone or silent, or out of step.
        """
        self._ring.transfer(outbox, inbox, watch)

    def finish(self) -> None:
        """No sink keeps a slot."""

    def close(self) -> None:
        """Free everything."""
        self._ring.close()


@dataclass(frozen=True, slots=True)
class _DeviceBuffer:
    """A buffer on a GPU, as a `Memory`."""

    bytes: Tensor
    device: torch.device
    """Whose copies touch it: this process's own."""

    def fence(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class _DeviceMemory:
    """Buffers on GPUs, as a `MemoryKind`."""

    def create(self, nbytes: int, num_sinks: int, channel: Channel) -> tuple[Memory, list[Handle]]:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=channel.device)
        gpu = _uuid(buffer.device.index)
        # One export for each process that opens it: torch counts them against each other.
        exports = [_export(buffer) for _ in range(num_sinks)]
        handles = [Handle({"nbytes": nbytes, "gpu": gpu, "cuda": export}) for export in exports]
        return _DeviceBuffer(buffer, channel.device), handles

    def attach(self, handle: Handle, nbytes: int, channel: Channel) -> Memory:
        visible = [_uuid(index) for index in range(torch.cuda.device_count())]
        gpu, size = handle.description["gpu"], handle.description["nbytes"]
        if gpu not in visible or size != nbytes:
            raise RefitError(
                f"the source's buffer has {size:,} bytes on the GPU {gpu}, and this process needs {nbytes:,} and sees "
                f"{visible}: make the GPU visible to both (CUDA_VISIBLE_DEVICES), with the same bucket_bytes and slots",
                phase="prepare",
            )
        device = torch.device("cuda", visible.index(gpu))
        return _DeviceBuffer(_import(handle.description["cuda"], device), channel.device)


def _require_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise RefitError(
            f"CUDA IPC shares memory of GPUs, and this process's tensors are on {str(device)!r}; "
            f"SharedMemory and SharedMemoryRing serve CPUs",
            phase="prepare",
        )
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        setting = os.environ.get(variable, "")
        if "expandable_segments:true" in setting.lower().replace(" ", ""):
            raise RefitError(
                f"{variable}={setting!r}: memory of expandable segments is shared slowly, and in containers often not "
                f"at all; leave expandable_segments out in the processes that refit",
                phase="prepare",
            )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _export(buffer: Tensor) -> list[Any]:
    """What another process needs to open the memory of `buffer`; torch has no public name for it."""
    return _to_plain(buffer.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]


def _import(export: list[Any], device: torch.device) -> Tensor:
    _, *arguments = _from_plain(export)  # the exporter's index of the GPU; ours may be another
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *arguments)  # noqa: SLF001 - as above
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _to_plain(export: Sequence[Any]) -> list[Any]:
    """What torch exports, as JSON can say it: bytes become {"base64": …}."""
    return [{"base64": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in export]


def _from_plain(plain: Sequence[Any]) -> list[Any]:
    return [base64.b64decode(x["base64"]) if isinstance(x, dict) else x for x in plain]
