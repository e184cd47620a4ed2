"""What a run was made from: software versions, hardware, state of the code, origin of each recipe key.

It does not know secrets: no environment variable, host name, user name or command line is read. `torch` and Ray are not
asked either, since both begin to hold what they look at.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory, RunDirectoryError, describe

__all__ = ["collect_versions", "write_origins"]

_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "ray",
    "megatron-core",
    "rl-launcher",
    "rl-algorithms",
    "rl-generation",
    "rl-backends",
    "rl-refit",
    "rl-parallel-plans",
)

# A repository on a slow network disk, or a driver that hangs, must not hold up a run for a line in its report.
_GIT_TIMEOUT_S = 2.0
_NVIDIA_TIMEOUT_S = 5.0
_CPUINFO, _MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")

Versions = dict[str, str | int | bool | list[str] | dict[str, str] | None]


def collect_versions(repository: Path | None = None) -> Versions:
    """Collect what somebody else needs to repeat a run.

    Args:
        repository: a folder inside a git repository; the current directory by default.

    Returns:
        `collected_at` (ISO 8601, UTC), `python`, `platform`, `cpu` (its model), `cpu_count`, `memory_bytes`, `gpus`
        (name and memory of each, [] without `nvidia-smi`), `gpu_driver`, one entry a distribution (its version, or None
        where it is not installed), `git_commit`, `git_dirty` and `git_diff_stat` (None outside a repository), and
        `packages`: every installed distribution with its version.
    """
    commit = _git(repository, "rev-parse", "HEAD")
    changes = None if commit is None else _git(repository, "status", "--porcelain", "--untracked-files=no")
    gpus, driver = _gpus()
    return {
        "collected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _field(_CPUINFO, "model name"),
        "cpu_count": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus,
        "gpu_driver": driver,
        **{name: _installed_version(name) for name in _DISTRIBUTIONS},
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "git_diff_stat": _git(repository, "diff", "--stat", "HEAD") if changes else None,
        "packages": _packages(),
    }


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, str]:
    # A half-removed distribution has neither name nor version.
    found = {str(each.name).lower(): str(each.version) for each in importlib.metadata.distributions() if each.name}
    return dict(sorted(found.items()))


def _gpus() -> tuple[list[str], str | None]:
    query = "--query-gpu=name,memory.total,driver_version"
    answer = _answer(["nvidia-smi", query, "--format=csv,noheader"], timeout_s=_NVIDIA_TIMEOUT_S)
    rows = [[word.strip() for word in line.split(",")] for line in (answer or "").splitlines()]
    whole = [row for row in rows if len(row) == 3]
    return [f"{name}, {memory}" for name, memory, _ in whole], whole[0][2] if whole else None


def _field(path: Path, name: str) -> str | None:
    """The value of the first `name : value` line, where the system has such a file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)


def _memory_bytes() -> int | None:
    words = (_field(_MEMINFO, "MemTotal") or "").split()
    return 1024 * int(words[0]) if words and words[0].isdigit() else None


def _git(repository: Path | None, *arguments: str) -> str | None:
    return _answer(["git", *arguments], timeout_s=_GIT_TIMEOUT_S, folder=repository)


def _answer(command: list[str], *, timeout_s: float, folder: Path | None = None) -> str | None:
    try:
        answer = subprocess.run(  # noqa: S603 - fixed words
            command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def write_origins(run: RunDirectory, origins: Mapping[str, object], *, recipe: object) -> None:
    """Write `str(origin)` by dotted key; an override is quoted in it, hence credentials of `recipe` are taken out.

    Raises:
        RunDirectoryError: the disk refused it.
    """
    secrets = Secrets.of(recipe)
    written = {key: secrets.scrub(str(origin)) for key, origin in origins.items()}
    try:
        run.origins.write_text(json.dumps(written, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{run.origins} cannot be written: {describe(error)}") from error
