"""What is looked at of the machine: shared memory, file descriptors, memory, disks, the cache of the hub.

It reads, and writes one temporary file into each folder that a run would write into.
"""

import os
import resource
import shutil
import tempfile
from pathlib import Path

from rl_launcher.doctor.finding import Finding, State
from rl_launcher.doctor.trying import ask

__all__ = ["descriptors", "disk", "hub_cache", "memory", "shared_memory"]

GIB = 2**30
# Docker gives 64 MiB, in which Ray's object store and NCCL's buffers do not fit; 1 GiB holds the tests' models.
SMALL_SHM = GIB
SHM_TRIAL_BYTES = 16 * 2**20
# What Ray asks for on a machine of many actors.
MANY_DESCRIPTORS = 65536
FEW_DESCRIPTORS = 4096
# A checkpoint of the quickstart is 5 MB; of a model of 0.5 B parameters, with its optimizer, 6 GB.
LITTLE_DISK = 10 * GIB
LITTLE_MEMORY = 4 * GIB


def shared_memory(timeout_s: float, folder: str = "/dev/shm") -> Finding:  # noqa: S108 - the one of the system
    """Write 16 MiB into /dev/shm, and say how much there is."""
    did = f"wrote and read {SHM_TRIAL_BYTES // 2**20} MiB"
    hint = "give the container more: --shm-size=16g, or --ipc=host; on Kubernetes an emptyDir of medium Memory"
    if not Path(folder).is_dir():
        return Finding(name=folder, state="broken", did="looked for it", says="is not there", hint=hint)
    usage = shutil.disk_usage(folder)
    answer = ask("shared_memory", folder, str(SHM_TRIAL_BYTES), timeout_s=timeout_s)
    says = f"{_size(usage.total)}, {_size(usage.free)} free"
    state: State = "broken" if answer.failure else "limited" if usage.total < SMALL_SHM else "works"
    return Finding(
        name=folder,
        state=state,
        did=did,
        says=answer.failure or says,
        hint=hint if state != "works" else "",
        figures={"total_bytes": usage.total, "free_bytes": usage.free},
    )


def descriptors() -> Finding:
    """Read how many files and sockets a process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = soft if soft != resource.RLIM_INFINITY else MANY_DESCRIPTORS
    return Finding(
        name="file descriptors",
        state="works" if least >= FEW_DESCRIPTORS else "limited",
        did="read the limit",
        says=f"{_limit(soft)} (at most {_limit(hard)})",
        hint=f"`ulimit -n {MANY_DESCRIPTORS}`: each actor of Ray holds many" if least < FEW_DESCRIPTORS else "",
        figures={"soft": soft, "hard": hard},
    )


def memory() -> Finding:
    """Read how much memory the machine has free, and what the container allows."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with Path("/proc/meminfo").open(encoding="ascii") as file:  # counts what caches would give back
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    allowed = _allowed_by_container()
    usable = min(free, allowed) if allowed is not None else free
    return Finding(
        name="memory",
        state="works" if usable >= LITTLE_MEMORY else "limited",
        did="read what is available",
        says=f"{_size(usable)} available" + (" (limit of the container)" if usable < free else ""),
        hint="the quickstart takes 1 GiB, Ray and vLLM on a CPU several each" if usable < LITTLE_MEMORY else "",
        figures={"available_bytes": usable},
    )


def _allowed_by_container() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None  # not a cgroup of version 2: the machine's figure stands
    return None if limit == "max" else max(int(limit) - used, 0)


def disk(folder: Path | None = None) -> Finding:
    """Write a file where runs would go, and say how much is free there."""
    folder = folder or Path.cwd()
    free = shutil.disk_usage(folder).free
    failure = _refused_to_write(folder)
    state: State = "broken" if failure else "limited" if free < LITTLE_DISK else "works"
    return Finding(
        name="disk",
        state=state,
        did=f"wrote a file in {folder}",
        says=failure or f"{_size(free)} free in {folder}",
        hint={"broken": "start runs in a folder that is yours", "limited": "checkpoints of large models need more"}.get(
            state, ""
        ),
        figures={"free_bytes": free},
    )


def hub_cache() -> Finding:
    """Say where the Hugging Face cache is, and whether it can be written."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    there = next(parent for parent in (cache, *cache.parents) if parent.exists())
    failure = _refused_to_write(there)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
    number = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    free = shutil.disk_usage(there).free
    says = f"{cache}: {number} models, {_size(free)} free" + (", offline by HF_HUB_OFFLINE" if offline else "")
    return Finding(
        name="hub cache",
        state="limited" if failure else "works",
        did=f"wrote a file in {there}",
        says=failure or says,
        hint="set HF_HOME to a folder that is yours" if failure else "",
        figures={"path": str(cache), "models": number, "free_bytes": free, "offline": offline},
    )


def _refused_to_write(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"rl-launcher")
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


def _size(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"
