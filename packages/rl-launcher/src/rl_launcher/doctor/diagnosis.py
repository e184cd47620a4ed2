"""All that the doctor finds on a machine, and what follows for each feature. It prints nothing."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from rl_launcher.doctor import machine, parts
from rl_launcher.doctor.features import Verdict, verdicts
from rl_launcher.doctor.finding import Finding
from rl_launcher.doctor.matrix import Match, installed_versions, match, matrix

__all__ = ["Diagnosis", "diagnose"]

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
    torch, gpus = parts.torch(timeout_s)
    number = gpus.figures.get("gpus", 0)
    num_gpus = number if isinstance(number, int) else 0
    trials: list[Callable[[], Finding | list[Finding]]] = [
        lambda: parts.tensorboard(timeout_s),
        lambda: parts.collectives(num_gpus, timeout_s),
        lambda: parts.cuda(num_gpus, timeout_s),
        lambda: parts.ray(versions, timeout_s),
        lambda: parts.importable("vLLM", "vllm", versions, timeout_s=timeout_s),
        lambda: parts.importable("megatron-core", "megatron-core", versions, timeout_s=timeout_s),
        lambda: parts.trackers(versions),
        lambda: machine.shared_memory(timeout_s),
        machine.memory,
        machine.disk,
        machine.hub_cache,
        machine.descriptors,
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waited: list[Future[Finding | list[Finding]]] = [pool.submit(trial) for trial in trials]
        answers = [each.result() for each in waited]
    tried = [finding for each in answers for finding in (each if isinstance(each, list) else [each])]
    return (torch, gpus, *tried)
