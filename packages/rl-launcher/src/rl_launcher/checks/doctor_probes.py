"""`python -m rl_launcher.checks.doctor_probes NAME`: check one component, and print its figures as one line of JSON.

`doctor_findings.run_probe` runs each probe in its own process; an exception means that the component does not work.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = timedelta(seconds=30)  # of a collective or a task; the process has its own, longer deadline
ELEMENTS = 1024


def torch_works() -> dict[str, Any]:
    """Multiply on the CPU, add on the first GPU, and return what torch knows of the GPUs."""
    import torch

    square = torch.eye(8) @ torch.eye(8)
    if not torch.equal(square, torch.eye(8)):
        raise ArithmeticError("the product of identity matrices is wrong")
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
    """All-reduce one tensor over `processes` processes on this machine: gloo on loopback, NCCL with a GPU each."""
    import torch.multiprocessing as mp

    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, int(processes), f"{folder}/store")
        mp.spawn(_add_up, args=arguments, nprocs=int(processes))  # type: ignore[attr-defined,no-untyped-call]
    return {"processes": int(processes)}


def _add_up(rank: int, backend: str, processes: int, store: str) -> None:  # noqa: PLR0917 - spawn passes positional arguments
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
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    ranks = torch.full((ELEMENTS,), float(rank + 1), device=device)
    dist.all_reduce(ranks)
    expected = processes * (processes + 1) / 2
    if not torch.equal(ranks, torch.full_like(ranks, expected)):
        raise ArithmeticError(f"rank {rank} got {ranks[0].item()} as the sum instead of {expected}")
    dist.destroy_process_group()


def cuda_ipc() -> dict[str, Any]:
    """Let another process write into a tensor of this one's GPU memory."""
    import torch
    import torch.multiprocessing as mp

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


def _fill(tensor: Any) -> None:
    import torch

    tensor.fill_(1)
    torch.cuda.synchronize()


def shared_memory(folder: str, size: str) -> dict[str, Any]:
    """Write `size` bytes to `folder` and read the first of them back."""
    with tempfile.TemporaryFile(dir=folder) as file:
        pattern = b"rl-launcher " * 4096
        written = 0
        while written < int(size):
            written += file.write(pattern)
        file.flush()
        file.seek(0)
        if file.read(len(pattern)) != pattern:
            raise OSError(f"{folder} does not return what was written")
    return {"bytes": written}


def ray_starts() -> dict[str, Any]:
    """Start Ray with one CPU, run one task, and stop it."""
    import ray

    # The prefix is short because the paths of Ray's sockets may have at most 107 characters.
    # Cleanup ignores errors because Ray's agents may still write for a moment after the shutdown.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder)
        try:
            process_id = ray.get(ray.remote(_process_id).remote(), timeout=TIMEOUT.total_seconds())
        finally:
            ray.shutdown()
    return {"ray": ray.__version__, "in_another_process": process_id != os.getpid()}


def _process_id() -> int:  # Ray refuses the builtin os.getpid
    return os.getpid()


def imports(module: str) -> dict[str, Any]:
    """Import one module, for example `vllm`."""
    import importlib

    return {"version": str(getattr(importlib.import_module(module), "__version__", ""))}


def tensorboard_writes() -> dict[str, Any]:
    """Write one value as a TensorBoard event."""
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
    from rl_launcher.checks.doctor_findings import RESULT_PREFIX

    name, *rest = arguments
    sys.stdout.write(f"\n{RESULT_PREFIX}{json.dumps(PROBES[name](*rest))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
