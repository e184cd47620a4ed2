"""The checks of `rl-launcher doctor`: the machine itself, and each installed component in a subprocess.

Every check returns a `Finding`. Nothing heavy is imported here: `run_probe` runs a function of `doctor_probes` in
another process with a deadline, so a component that hangs or crashes does not end doctor.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

State = Literal["works", "limited", "absent", "broken"]
"""`limited` works but is less than some runs need; `broken` is installed and does not work; `absent` is not there."""

GIB = 2**30
# Docker's default of 64 MiB is too small for Ray's object store and NCCL's buffers; 1 GiB holds the tests' models.
SMALL_SHM = GIB
SHM_TRIAL_BYTES = 16 * 2**20
# What Ray recommends for a machine with many actors.
MANY_DESCRIPTORS = 65536
FEW_DESCRIPTORS = 4096
# A checkpoint of the quickstart takes 5 MB; one of a 0.5B model with its optimizer takes 6 GB.
LITTLE_DISK = 10 * GIB
LITTLE_MEMORY = 4 * GIB
LONGEST_LINE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    """What was checked, for example `gloo`."""
    state: State
    checked: str
    """How it was checked."""
    result: str
    """Figures, or the last line of the error."""
    hint: str = ""
    """What to do about it."""
    figures: dict[str, object] = field(default_factory=dict)
    """The result as data, for `--json`."""


def _found(
    name: str, checked: str, result: str, *, failure: str = "", limited: bool = False, hint: str = "", **figures: object
) -> Finding:
    """A finding about something that is there; the hint is left out if it works."""
    state: State = "broken" if failure else "limited" if limited else "works"
    hint = "" if state == "works" else hint
    return Finding(name=name, state=state, checked=checked, result=failure or result, hint=hint, figures=figures)


# ---- Components, each in another process.


class Component(NamedTuple):
    """How one component is checked."""

    probe: tuple[str, ...]
    """A function of `doctor_probes`, or `module:function`; and its arguments."""
    checked: str
    hint: str = ""
    works: str = ""
    """The result if it works; empty for the installed version."""
    distribution: str = ""
    """What must be installed; empty if torch brings it."""
    gpus: int = 0
    """How many GPUs it needs; with fewer it is not checked."""


_ALL_REDUCE, _SUM = "rl_refit.machine_check:check_all_reduce", "the sum is right"
_NCCL_HINT = "run again with NCCL_DEBUG=INFO; if NCCL_P2P_DISABLE=1 helps, the link between the GPUs is at fault"
COMPONENTS = {
    "TensorBoard": Component(("tensorboard",), "wrote one value", works="written"),
    "gloo": Component(
        (_ALL_REDUCE, "gloo", "2"),
        "all-reduce over 2 processes on loopback",
        "several ranks need it even on one machine; is the interface lo up?",
        works=_SUM,
    ),
    "NCCL × 1": Component((_ALL_REDUCE, "nccl", "1"), "all-reduce over 1 GPU", _NCCL_HINT, works=_SUM, gpus=1),
    "NCCL × 2": Component((_ALL_REDUCE, "nccl", "2"), "all-reduce over 2 GPUs", _NCCL_HINT, works=_SUM, gpus=2),
    # Through which colocated engines receive weights without a copy in host memory.
    "CUDA IPC": Component(
        ("rl_refit.machine_check:check_cuda_ipc",),
        "wrote from another process",
        "in a container use --ipc=host and give both the same GPUs; engines on their own GPUs do not need it",
        works="the write arrived",
        gpus=1,
    ),
    "Ray": Component(
        ("ray",),
        "started it with one CPU, ran a task, stopped it",
        "its logs are in the session folder that the line names; /dev/shm and file descriptors are the usual causes",
        distribution="ray",
    ),
    "vLLM": Component(("imports", "vllm"), "imported vllm in another process", distribution="vllm"),
    "megatron-core": Component(
        ("imports", "megatron.core"), "imported megatron.core in another process", distribution="megatron-core"
    ),
}
"""Every component besides torch and the GPUs, by the name of its finding."""


def component(name: str, versions: Mapping[str, str], *, timeout_s: float) -> Finding:
    """Check a row of `COMPONENTS`."""
    row = COMPONENTS[name]
    if row.distribution and row.distribution not in versions:
        return Finding(name=name, state="absent", checked="looked for it", result="not installed")
    probe = run_probe(*row.probe, timeout_s=timeout_s)
    result = row.works or versions[row.distribution]
    return _found(name, row.checked, result, failure=probe.failure, hint=row.hint, **probe.figures)


def torch(timeout_s: float) -> tuple[Finding, Finding]:
    """Check torch on the CPU and on GPUs; the second finding is about the GPUs."""
    probe = run_probe("torch", timeout_s=timeout_s)
    figures = dict(probe.figures)
    checked = "multiplied on the CPU, in another process"
    works = _found("torch", checked, str(figures.get("torch")), failure=probe.failure, **figures)
    state: State = "absent"
    result, hint = "", ""
    if probe.failure:
        result = "unknown, because torch does not work"
    elif figures["gpus"]:
        state, sizes = "works", ", ".join(sorted({str(each) for each in figures["memory_gib"]}))
        result = (
            f"{figures['gpus']} × {', '.join(figures['names'])}, {sizes} GiB, "
            f"CUDA {figures['cuda_of_torch']}, capability {figures['capability']}, NCCL {figures['nccl']}"
        )
    elif shutil.which("nvidia-smi") is None:
        figures, result = {}, "none, and no driver: everything runs on the CPU"
    else:
        build = f"for CUDA {figures['cuda_of_torch']}" if figures["cuda_of_torch"] else "for the CPU only"
        state, result = "broken", f"nvidia-smi is installed, but torch, built {build}, sees no GPU"
        hint = "install a torch for the CUDA version that `nvidia-smi` names, or pass the GPUs to this container"
    checked = "queried torch, and added on each kind"
    return works, Finding(name="GPU", state=state, checked=checked, result=result, hint=hint, figures=figures)


def trackers(versions: Mapping[str, str]) -> Finding:
    """Look which trackers are installed. None is called, since that would send something."""
    names = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
    installed = [f"{name} {versions[each]}" for name, each in names.items() if each in versions]
    return Finding(
        name="trackers",
        state="works" if installed else "absent",
        checked="looked for them; nothing was sent",
        result=", ".join(installed) or "none of wandb, mlflow and trackio",
    )


# ---- The machine.


def shared_memory(timeout_s: float, folder: str = "/dev/shm") -> Finding:  # noqa: S108 - the system's own
    """Write 16 MiB to /dev/shm, and report its size."""
    hint = "give the container more: --shm-size=16g or --ipc=host; on Kubernetes an emptyDir of medium Memory"
    if not Path(folder).is_dir():
        return _found(folder, "looked for it", "", failure="does not exist", hint=hint)
    usage = shutil.disk_usage(folder)
    return _found(
        folder,
        f"wrote and read {SHM_TRIAL_BYTES // 2**20} MiB",
        f"{_gib(usage.total)}, {_gib(usage.free)} free",
        failure=run_probe("shared_memory", folder, str(SHM_TRIAL_BYTES), timeout_s=timeout_s).failure,
        limited=usage.total < SMALL_SHM,
        hint=hint,
        total_bytes=usage.total,
        free_bytes=usage.free,
    )


LEFT: dict[str, Any] = {"folders": [], "files": [], "bytes": 0}


def left_behind(timeout_s: float) -> Finding:
    """Look for what killed runs left: folders of clusters and engines, and shared memory that nobody has mapped."""
    probe = run_probe("left_behind", timeout_s=timeout_s)
    folders, files, size = (probe.figures.get(name) or nothing for name, nothing in LEFT.items())
    parts = [f"{len(folders)} folders of killed runs, as {folders[0]}; the next run removes them"] if folders else []
    if files:
        owners = "of Python or vLLM programs that were killed, if not of another container"
        parts.append(f"{len(files)} files that no process of this machine has mapped, {_gib(size)}, {owners}")
    return _found(
        "leftovers",
        "looked for files of killed runs",
        "; ".join(parts) or "none",
        failure=probe.failure,
        limited=bool(parts),
        hint=f"remove such files once no other container uses them: rm {files[0]}" if files else "",
        **probe.figures,
    )


def descriptors() -> Finding:
    """Read how many files and sockets a process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ["unlimited" if number == resource.RLIM_INFINITY else f"{number:,}" for number in (soft, hard)]
    return _found(
        "file descriptors",
        "read the limit",
        f"{limits[0]} (at most {limits[1]})",
        limited=soft != resource.RLIM_INFINITY and soft < FEW_DESCRIPTORS,
        hint=f"`ulimit -n {MANY_DESCRIPTORS}`: each Ray actor holds many",
        soft=soft,
        hard=hard,
    )


def memory() -> Finding:
    """Read how much memory is available on the machine and within the container's limit."""
    # MemAvailable includes the caches that the kernel would give up.
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    usable, cgroup = free, Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit: only the machine's figure counts
        limit = int((cgroup / "memory.max").read_text())
        usable = min(free, max(limit - int((cgroup / "memory.current").read_text()), 0))
    return _found(
        "memory",
        "read what is available",
        f"{_gib(usable)} available" + (" (the container's limit)" if usable < free else ""),
        limited=usable < LITTLE_MEMORY,
        hint="the quickstart takes 1 GiB; Ray and vLLM on a CPU take several each",
        available_bytes=usable,
    )


def disk(folder: Path | None = None) -> Finding:
    """Write a file where runs would go, and read how much is free there."""
    folder = folder or Path.cwd()
    free, failure = shutil.disk_usage(folder).free, _write_failure(folder)
    return _found(
        "disk",
        f"wrote a file in {folder}",
        f"{_gib(free)} free in {folder}",
        failure=failure,
        limited=free < LITTLE_DISK,
        hint="start runs in a folder that you can write to" if failure else "checkpoints of large models need more",
        free_bytes=free,
    )


def hub_cache() -> Finding:
    """Find the Hugging Face cache, and check that it can be written."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    failure = _write_failure(existing)
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    free = shutil.disk_usage(existing).free
    result = f"{cache}: {models} models, {_gib(free)} free" + (", offline because of HF_HUB_OFFLINE" if offline else "")
    return _found(
        "hub cache",
        f"wrote a file in {existing}",
        failure or result,
        limited=bool(failure),
        hint="set HF_HOME to a folder that you can write to",
        path=str(cache),
        models=models,
        free_bytes=free,
        offline=offline,
    )


def _write_failure(folder: Path) -> str:
    """Return why a file cannot be written to `folder`, or an empty string."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"rl-launcher")
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"


# ---- Probes in another process.


class ProbeResult(NamedTuple):
    """What a probe returned."""

    figures: Mapping[str, Any]
    """Empty if it failed."""
    failure: str
    """The last line of its error, or that it took too long. Empty if it worked."""


RESULT_PREFIX = "doctor's result: "
"""Begins the line in which a probe prints its figures; libraries print other lines."""


def run_probe(probe: str, *arguments: str, timeout_s: float) -> ProbeResult:
    """Run a probe in a new process, and kill its process group after `timeout_s` seconds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "rl_launcher.checks.doctor_probes", probe, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own process group, so that all that it starts can be killed
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the probe ended everything that it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    if code is None:
        last = f"; its last line: {_short(lines[-1])}" if lines else ""
        return ProbeResult({}, f"no result in {timeout_s:g} s{last}")
    results = [line.removeprefix(RESULT_PREFIX) for line in lines if line.startswith(RESULT_PREFIX)]
    if code == 0 and results:
        return ProbeResult(json.loads(results[-1]), "")
    if code < 0:
        return ProbeResult({}, f"killed by {signal.Signals(-code).name}")
    # The line of a traceback that names the error is the last one, unless notes follow it.
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))] or lines
    return ProbeResult({}, _short(named[-1]) if code and named else f"exit code {code}")


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"
