"""What each feature needs, and hence what it lacks here. It tries nothing itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_launcher.doctor.finding import Finding

__all__ = ["EXTRAS", "Verdict", "verdicts"]

EXTRAS = {
    "Ray": "rl-launcher[ray]",
    "vLLM": "rl-launcher[vllm]",
    "megatron-core": "rl-launcher[megatron]",
    "datasets": "rl-launcher[data]",
    "peft": "rl-backends[lora]",
    "torchao": "rl-backends[8bit]",
    "wandb": "rl-launcher[wandb]",
    "mlflow-skinny": "rl-launcher[mlflow]",
    "trackio": "rl-launcher[trackio]",
}
"""What brings what is missing."""

SHM = "/dev/shm"  # noqa: S108 - the name of a finding

NEEDS: dict[str, tuple[str, ...]] = {
    "quickstart": ("torch", "TensorBoard", "disk"),
    "several ranks on this machine": ("torch", "gloo", "Ray", SHM),
    "training on GPUs": ("torch", "GPU", "NCCL × 1"),
    "training on several GPUs": ("torch", "GPU", "NCCL × 2", "Ray", SHM),
    "vLLM engines": ("torch", "vLLM"),
    "engines that share the trainer's GPUs": ("GPU", "vLLM", "Ray", "CUDA IPC"),
    "Megatron": ("torch", "megatron-core"),
}
"""By the names of findings. What has no finding here needs only a package, and is in `PACKAGES`."""

PACKAGES = {
    "data sets of the hub, Parquet": "datasets",
    "LoRA": "peft",
    "8-bit optimizer": "torchao",
    "Weights & Biases": "wandb",
    "MLflow": "mlflow-skinny",
    "trackio": "trackio",
}
"""Features that need one package more, which is looked for and not tried."""

ON_GPUS = {"NCCL × 1", "NCCL × 2", "CUDA IPC"}
NO_GPU = "no GPU that torch sees"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a feature can be used here."""

    feature: str
    """What one would use."""

    ready: bool
    """Whether nothing is missing or broken."""

    reasons: tuple[str, ...]
    """What is, and what to do."""


def verdicts(findings: Sequence[Finding], versions: Mapping[str, str]) -> list[Verdict]:
    """Judge every feature by what was found."""
    by_name = {finding.name: finding for finding in findings}
    judged = []
    for feature, names in NEEDS.items():
        reasons = tuple(dict.fromkeys(reason for name in names if (reason := _lack(name, by_name))))
        judged.append(Verdict(feature=feature, ready=not reasons, reasons=reasons))
    for feature, package in PACKAGES.items():
        missing = () if package in versions else (_missing(package),)
        judged.append(Verdict(feature=feature, ready=not missing, reasons=missing))
    return judged


def _lack(name: str, by_name: Mapping[str, Finding]) -> str:
    finding = by_name.get(name)
    if finding is None:  # tried on GPUs only
        gpus = "GPU" in by_name and by_name["GPU"].state == "works"
        if name not in ON_GPUS:
            return f"{name} was not tried"
        return "one GPU only" if name == "NCCL × 2" and gpus else NO_GPU
    match finding.state:
        case "works" | "limited":
            return ""
        case "absent":
            return NO_GPU if name == "GPU" else _missing(name) if name in EXTRAS else f"no {name}"
        case "broken":
            return f"{name} does not work: {finding.says}"


def _missing(name: str) -> str:
    return f"missing {name}: pip install '{EXTRAS[name]}'"
