"""`python -m rl_launcher.checks.doctor_probes NAME`: try one thing, and print what came out as one line of JSON.

Each is run in a process of its own by `trying.ask`; what it raises is its answer. It does not judge.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["PROBES", "main"]

PATIENCE = timedelta(seconds=30)  # of a collective; the deadline of the process is behind it
ELEMENTS = 1024


def torch_works() -> dict[str, Any]:
    """Multiply on the CPU, and say what torch sees of a GPU."""
    import torch

    square = torch.eye(8) @ torch.eye(8)
    if not torch.equal(square, torch.eye(8)):
        raise ArithmeticError("a product of unit matrices is not one")
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
    }
    if figures["gpus"]:
        device = torch.device("cuda")
        if float(torch.ones(ELEMENTS, device=device).sum()) != ELEMENTS:
            raise ArithmeticError("a sum on the GPU is wrong")
        properties = [torch.cuda.get_device_properties(index) for index in range(figures["gpus"])]
        figures["names"] = sorted({each.name for each in properties})
        figures["memory_gib"] = [round(each.total_memory / 2**30, 1) for each in properties]
        figures["free_gib"] = [round(torch.cuda.mem_get_info(i)[0] / 2**30, 1) for i in range(figures["gpus"])]
        figures["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return figures


def collective(backend: str, processes: str) -> dict[str, Any]:
    """Add up one tensor over so many processes on this machine; gloo on loopback, NCCL on one GPU each."""
    import torch.multiprocessing as mp

    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, int(processes), f"{folder}/store")
        mp.spawn(_add_up, args=arguments, nprocs=int(processes))  # type: ignore[attr-defined,no-untyped-call]
    return {"processes": int(processes)}


def _add_up(rank: int, backend: str, processes: int, store: str) -> None:  # noqa: PLR0917 - spawn gives them so
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(ranks)
    expected = processes * (processes + 1) / 2
    if not torch.equal(ranks, torch.full_like(ranks, expected)):
        raise ArithmeticError(f"rank {rank} has {ranks[0].item()} for the sum, and it is {expected}")
    dist.destroy_process_group()


def cuda_ipc() -> dict[str, Any]:
    """Let another process write into a tensor of this one's GPU memory."""
    import torch
    import torch.multiprocessing as mp

    context = mp.get_context("spawn")
    shared = torch.zeros(ELEMENTS, device="cuda")
    process = context.Process(target=_fill, args=(shared,))
    process.start()
    process.join(PATIENCE.total_seconds())
    if process.exitcode != 0:
        raise OSError(f"the other process ended with {process.exitcode}; IPC of CUDA may be off in this container")
    if float(shared.sum()) != ELEMENTS:
        raise ArithmeticError("what the other process wrote is not there")
    return {"bytes": shared.nbytes}


def _fill(tensor: Any) -> None:
    import torch

    tensor.fill_(1)
    torch.cuda.synchronize()


def shared_memory(folder: str, size: str) -> dict[str, Any]:
    """Write and read back so many bytes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        pattern = b"rl-launcher " * 4096
        written = 0
        while written < int(size):
            written += file.write(pattern)
        file.flush()
        file.seek(0)
        if file.read(len(pattern)) != pattern:
            raise OSError(f"what was written into {folder} is not there")
    return {"bytes": written}


def ray_starts() -> dict[str, Any]:
    """Start a Ray of one CPU, run one task in it, and end it."""
    import ray

    # Its sockets have long names, and the system allows 107 characters.
    # Its agents may write for a moment after its end.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder)
        try:
            answer = ray.get(ray.remote(_process_id).remote(), timeout=PATIENCE.total_seconds())
        finally:
            ray.shutdown()
    return {"ray": ray.__version__, "in_another_process": answer != os.getpid()}


def _process_id() -> int:
    return os.getpid()


def imports(module: str) -> dict[str, Any]:
    """Import one module, as `vllm`."""
    import importlib

    return {"version": str(getattr(importlib.import_module(module), "__version__", ""))}


def tensorboard_writes() -> dict[str, Any]:
    """Write one figure as TensorBoard's events."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("doctor", 1.0, 0)
        return {"bytes": sum(path.stat().st_size for path in Path(folder).iterdir())}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_works,
    "collective": collective,
    "cuda_ipc": cuda_ipc,
    "shared_memory": shared_memory,
    "ray": ray_starts,
    "imports": imports,
    "tensorboard": tensorboard_writes,
}


def main(arguments: list[str]) -> None:
    """Run one probe."""
    from rl_launcher.checks.doctor_findings import ANSWER

    name, *words = arguments
    sys.stdout.write(f"\n{ANSWER}{json.dumps(PROBES[name](*words))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
