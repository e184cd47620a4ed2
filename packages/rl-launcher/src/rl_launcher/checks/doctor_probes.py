"""`python -m rl_launcher.checks.doctor_probes PROBE`: check one component, and print its figures as one line of JSON.

`doctor_findings.run_probe` runs each probe in its own process; an exception means that the component does not work.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

TASK_TIMEOUT_S = 30.0  # of a task; the process has its own, longer deadline
ELEMENTS = 1024


def torch() -> dict[str, Any]:
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


def left_behind() -> dict[str, Any]:
    """Folders and shared memory of programs that were killed."""
    from rl_generation.vllm import processes
    from rl_launcher.ray.cluster import abandoned_folders

    parents = sorted({"/tmp", tempfile.gettempdir()})  # noqa: S108 - where runs make them
    clusters = [folder for parent in parents for folder in abandoned_folders(Path(parent))]
    there = processes.SHARED_MEMORY.is_dir()
    engines = processes.abandoned() if there else {}
    ours = {file for files in engines.values() for file in files}
    others = [file for file in processes.unmapped().values() if file not in ours] if there else []
    size = sum(file.stat().st_blocks * 512 for file in others if file.exists())  # a file may take less than its length
    return {"folders": [*map(str, [*clusters, *engines])], "files": sorted(map(str, others)), "bytes": size}


def shared_memory(folder: str, size: int) -> dict[str, Any]:
    """Write `size` bytes to `folder` and read the first of them back."""
    with tempfile.TemporaryFile(dir=folder) as file:
        pattern = b"rl-launcher " * 4096
        written = 0
        while written < size:
            written += file.write(pattern)
        file.flush()
        file.seek(0)
        if file.read(len(pattern)) != pattern:
            raise OSError(f"{folder} does not return what was written")
    return {"bytes": written}


def ray() -> dict[str, Any]:
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
    return {"version": str(getattr(importlib.import_module(module), "__version__", ""))}


def tensorboard() -> dict[str, Any]:
    """Write one value as a TensorBoard event."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("doctor", 1.0, 0)
        return {"bytes": sum(path.stat().st_size for path in Path(folder).iterdir())}


def main(arguments: list[str]) -> None:
    """Run one probe: a function of this module, or `module:function`. Arguments of digits are numbers."""
    from rl_launcher.checks.doctor_findings import RESULT_PREFIX

    probe, *rest = arguments
    module, _, function = probe.rpartition(":")
    check = getattr(importlib.import_module(module or __name__), function)
    figures = check(*(int(each) if each.isdigit() else each for each in rest))
    sys.stdout.write(f"\n{RESULT_PREFIX}{json.dumps(figures)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
