"""What the doctor looks at: the machine, and each installed component in a subprocess.

It does not know what probes do; `probes` does.

It reads, and writes one temporary file into each folder that a run would write into.

Each returns findings; nothing heavy is imported in this process. It does not know which feature needs what.
"""

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
from typing import Any, Literal

__all__ = [
    "Answer",
    "Finding",
    "State",
    "ask",
    "collectives",
    "cuda",
    "descriptors",
    "disk",
    "hub_cache",
    "importable",
    "memory",
    "ray",
    "shared_memory",
    "tensorboard",
    "torch",
    "trackers",
]

State = Literal["works", "limited", "absent", "broken"]
"""`limited` works and is less than somebody will want; `broken` is there and does not work; `absent` is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was tried, and what it showed."""

    name: str
    """What was looked at, as `gloo`."""

    state: State
    """How it is."""

    did: str
    """What was done to know."""

    says: str
    """What came out: figures, or the error's last line."""

    hint: str = ""
    """What to do about it."""

    figures: dict[str, object] = field(default_factory=dict)
    """The same as data, for `--json`."""


ANSWER = "doctor's answer: "
LONGEST_LINE = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe said."""

    figures: Mapping[str, Any]
    """Empty where it failed."""

    failure: str
    """Empty where it did not: the last line of its error, or that it took too long."""


def ask(probe: str, *words: str, timeout_s: float) -> Answer:
    """Run a probe with all that it starts, and end them all after `timeout_s` seconds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "rl_launcher.checks.doctor_probes", probe, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, to be ended whole
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    answers = [line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)]
    if code is None:
        return Answer({}, f"no answer in {timeout_s:g} s" + (f"; its last words: {_short(lines[-1])}" if lines else ""))
    if code != 0 or not answers:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Answer({}, _short(_error(lines)) if code > 0 and lines else how)
    return Answer(json.loads(answers[-1]), "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the probe ended all that it started
    process.wait()


def _error(lines: list[str]) -> str:
    """Return the line of a traceback that names the error: the last one, unless remarks follow it."""
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return named[-1] if named else lines[-1]


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


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


TRACKERS = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}


def torch(timeout_s: float) -> tuple[Finding, Finding]:
    """Try torch on the CPU and, where it sees one, the GPU; the second finding is of the GPUs."""
    answer = ask("torch", timeout_s=timeout_s)
    figures = dict(answer.figures)
    works = _finding("torch", answer, did="a product on the CPU, in another process", says=f"{figures.get('torch')}")
    return works, _gpus(answer, figures)


def _gpus(answer: Answer, figures: dict[str, object]) -> Finding:
    did = "asked torch, and added on each kind"
    if answer.failure:
        return Finding(name="GPU", state="absent", did=did, says="torch does not work, so it could not be asked")
    if figures["gpus"]:
        names, sizes = _texts(figures["names"]), _texts(figures["memory_gib"])
        says = (
            f"{figures['gpus']} × {', '.join(names)}, {', '.join(sorted(set(sizes)))} GiB, "
            f"CUDA {figures['cuda_of_torch']}, capability {figures['capability']}, NCCL {figures['nccl']}"
        )
        return Finding(name="GPU", state="works", did=did, says=says, figures=figures)
    if shutil.which("nvidia-smi") is None:
        return Finding(name="GPU", state="absent", did=did, says="none, and no driver: everything runs on the CPU")
    build = f"for CUDA {figures['cuda_of_torch']}" if figures["cuda_of_torch"] else "for the CPU only"
    return Finding(
        name="GPU",
        state="broken",
        did=did,
        says=f"nvidia-smi is here, and torch, built {build}, sees no GPU",
        hint="install a torch for the CUDA that `nvidia-smi` names, or hand the GPUs to this container",
        figures=figures,
    )


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return [str(each) for each in value]


def collectives(num_gpus: int, timeout_s: float) -> list[Finding]:
    """Try gloo over two processes on loopback and, with GPUs, NCCL over one and over two."""
    gloo = ask("collective", "gloo", "2", timeout_s=timeout_s)
    hint = "several ranks need it, even on one machine; is the interface lo up?"
    findings = [_finding("gloo", gloo, did="added over 2 processes on loopback", says="the sum is right", hint=hint)]
    for processes in (1, 2)[: min(num_gpus, 2)]:
        answer = ask("collective", "nccl", str(processes), timeout_s=timeout_s)
        findings.append(
            _finding(
                f"NCCL × {processes}",
                answer,
                did=f"added over {processes} GPU{'s' if processes > 1 else ''}",
                says="the sum is right",
                hint="run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 tells whether the link between GPUs is it",
            )
        )
    return findings


def cuda(num_gpus: int, timeout_s: float) -> list[Finding]:
    """Try CUDA IPC, by which colocated engines take weights without a copy through the host."""
    if not num_gpus:
        return []
    answer = ask("cuda_ipc", timeout_s=timeout_s)
    hint = "in a container give --ipc=host and the same GPUs to both; engines of their own GPUs do not need it"
    return [_finding("CUDA IPC", answer, did="wrote from another process", says="what it wrote is there", hint=hint)]


def ray(versions: Mapping[str, str], timeout_s: float) -> Finding:
    """Start a Ray on this machine, and end it."""
    did = "started one of one CPU, ran a task, ended it"
    if "ray" not in versions:
        return Finding(name="Ray", state="absent", did="looked for it", says="not installed")
    hint = "its logs are in the session folder that the line names; /dev/shm and file descriptors are the usual reasons"
    return _finding("Ray", ask("ray", timeout_s=timeout_s), did=did, says=versions["ray"], hint=hint)


def importable(name: str, distribution: str, versions: Mapping[str, str], *, timeout_s: float) -> Finding:
    """Import a module in another process, as vLLM, which is never imported here."""
    if distribution not in versions:
        return Finding(name=name, state="absent", did="looked for it", says="not installed")
    module = {"vllm": "vllm", "megatron-core": "megatron.core"}[distribution]
    answer = ask("imports", module, timeout_s=timeout_s)
    return _finding(name, answer, did=f"imported {module} in another process", says=versions[distribution])


def tensorboard(timeout_s: float) -> Finding:
    """Write one event."""
    return _finding("TensorBoard", ask("tensorboard", timeout_s=timeout_s), did="wrote one figure", says="written")


def trackers(versions: Mapping[str, str]) -> Finding:
    """Look which trackers are installed; asking them would send something."""
    there = [f"{name} {versions[distribution]}" for name, distribution in TRACKERS.items() if distribution in versions]
    return Finding(
        name="trackers",
        state="works" if there else "absent",
        did="looked for them; nothing was sent",
        says=", ".join(there) or "none of wandb, mlflow and trackio",
    )


def _finding(name: str, answer: Answer, *, did: str, says: str, hint: str = "") -> Finding:
    state: State = "broken" if answer.failure else "works"
    return Finding(
        name=name,
        state=state,
        did=did,
        says=answer.failure or says,
        hint=hint if answer.failure else "",
        figures=dict(answer.figures),
    )
