"""Whether gloo, NCCL and CUDA IPC work between processes of this machine, tried with one small tensor."""

import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

TIMEOUT = timedelta(seconds=30)
ELEMENTS = 1024


def check_all_reduce(backend: str, processes: int) -> dict[str, int]:
    """All-reduce one tensor over `processes` processes on this machine: gloo on loopback, NCCL with a GPU each.

    Returns:
        What was tried: the number of `processes`.

    Raises:
        Exception: what torch raises in the first process that fails; an ArithmeticError if the sum is wrong.
    """
    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, processes, f"{folder}/store")
        mp.spawn(_add_up, args=arguments, nprocs=processes)  # type: ignore[attr-defined,no-untyped-call]
    return {"processes": processes}


def _add_up(rank: int, backend: str, processes: int, store: str) -> None:  # noqa: PLR0917 - spawn passes positional arguments
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(ranks)
    expected = processes * (processes + 1) / 2
    if not torch.equal(ranks, torch.full_like(ranks, expected)):
        raise ArithmeticError(f"rank {rank} got {ranks[0].item()} as the sum instead of {expected}")
    dist.destroy_process_group()


def check_cuda_ipc() -> dict[str, int]:
    """Let another process write into a tensor of this one's GPU memory; return how many `bytes` arrived.

    Raises:
        OSError: the other process failed.
        ArithmeticError: what it wrote did not arrive.
    """
    context = mp.get_context("spawn")
    shared = torch.zeros(ELEMENTS, device="cuda")
    process = context.Process(target=_fill, args=(shared,))
    process.start()
    process.join(TIMEOUT.total_seconds())
    if process.exitcode != 0:
        raise OSError(f"the other process ended with {process.exitcode}; CUDA IPC may be disabled in this container")
    if float(shared.sum()) != ELEMENTS:
        raise ArithmeticError("what the other process wrote did not arrive")
    return {"bytes": shared.nbytes}


def _fill(tensor: Tensor) -> None:
    tensor.fill_(1)
    torch.cuda.synchronize()
