"""All that a refit asks of CUDA and NCCL; no other module of the package calls them.

Tests put a fake in their place, which has shared memory for a GPU's and gloo for NCCL, and records what each stream was
given: so that all but the lines here runs, and its order is checked, without a GPU.

Work on a GPU is begun in streams and ends later. A refit runs in the current stream of its thread, and NCCL in one of
its own. Whoever tells another process or thread that memory can be read or written waits for an event first; whoever
looks at memory that other streams of this process use, such as a trainer's or an engine's, waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_refit.errors import DeadlineError
from rl_refit.stores import in_thread

__all__ = [
    "communicator",
    "empty",
    "export",
    "import_exported",
    "index_of",
    "record",
    "synchronize",
    "use",
    "uuids",
]


def uuids() -> tuple[str, ...]:
    """The UUIDs of the GPUs that this process sees."""
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))


def index_of(device: torch.device) -> int:
    """The number of a GPU among those that this process sees."""
    return torch.cuda.current_device() if device.index is None else device.index


def use(device: torch.device) -> None:
    """Make `device` this thread's current GPU: a new thread is on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty(nbytes: int, device: torch.device) -> Tensor:
    """Memory of `device`, uint8 [nbytes], of any values."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def record(device: torch.device) -> Callable[[], bool]:
    """Says whether what this thread's current stream was given until now is over; of a CPU it always is."""
    if device.type != "cuda":
        return lambda: True
    is_over: Callable[[], bool] = torch.cuda.current_stream(device).record_event().query
    return is_over


def synchronize(device: torch.device, limit_s: float) -> None:
    """Wait until all streams of this process on `device` have done what they were given.

    Raises:
        DeadlineError: They have not within `limit_s` seconds.
    """
    if device.type == "cuda":
        # A device cannot be asked, and a hung one, as in a collective whose peer died, waits on.
        waiting = in_thread(partial(torch.cuda.synchronize, device), name="GPU")
        try:
            waiting.result(limit_s)
        except TimeoutError:
            raise DeadlineError(f"{device} has not done in {limit_s:.1f} s what it was given: does it hang?") from None


def export(buffer: Tensor) -> tuple[Any, ...]:
    """What one other process needs to map the memory of `buffer`, made anew for each; plain values and bytes.

    Torch has no public name for it, and counts exports against imports.
    """
    exported: tuple[Any, ...] = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return exported


def import_exported(exported: list[Any], device: torch.device) -> Tensor:
    """The memory of another process, uint8; `device` is its GPU, as this process numbers it."""
    _, *arguments = exported  # the exporter's number of the GPU
    storage = torch.UntypedStorage._new_shared_cuda(device.index, *arguments)  # noqa: SLF001 - as above
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def communicator(place: tuple[Any, int, int], timeout: timedelta, device: torch.device) -> Any:
    """A communicator of NCCL over store, rank and number of ranks.

    Its watchdog ends the process when a work takes longer than `timeout`, which must lie beyond our own deadlines.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001  (what init_process_group itself uses)
    backend: Any = ProcessGroupNCCL(*place, options)
    backend.eager_connect_single_device(device)
    return backend
