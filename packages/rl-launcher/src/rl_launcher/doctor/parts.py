"""What is tried of the software: torch, collectives, CUDA, Ray, vLLM, Megatron, TensorBoard.

Each returns findings; nothing heavy is imported in this process. It does not know which feature needs what.
"""

import shutil
from collections.abc import Mapping

from rl_launcher.doctor.finding import Finding, State
from rl_launcher.doctor.trying import Answer, ask

__all__ = ["collectives", "cuda", "importable", "ray", "tensorboard", "torch", "trackers"]

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
