"""`python -m rl_launcher.checks.doctor_probes NAME`: check one component, and print its figures as one line of JSON.

`doctor_findings.run_probe` runs each probe in its own process; an exception means that the component does not work.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASK_TIMEOUT_S = 30.0  # of a task; the process has its own, longer deadline
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
            process_id = ray.get(ray.remote(_process_id).remote(), timeout=TASK_TIMEOUT_S)
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


def check_all_reduce(backend: str, processes: str) -> dict[str, Any]:
    """All-reduce one tensor over `processes` processes on this machine."""
    from rl_refit import machine_check

    machine_check.check_all_reduce(backend, int(processes))
    return {"processes": int(processes)}


def check_cuda_ipc() -> dict[str, Any]:
    """Let another process write into a tensor of this one's GPU memory."""
    from rl_refit import machine_check

    return {"bytes": machine_check.check_cuda_ipc()}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_works,
    "collective": check_all_reduce,
    "cuda_ipc": check_cuda_ipc,
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
