"""What a run was made with: software versions, hardware, state of the code, and where each recipe key was set.

No environment variable, host name, user name or command line is read, since they may hold secrets. `torch` and Ray are
not queried either: asking them about a GPU initializes it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from rl_observe.redaction import Secrets
from rl_observe.run_directory import RunDirectory, write_text

_LIBRARIES = ("torch", "transformers", "tokenizers", "vllm", "ray", "megatron-core")
_PACKAGES = ("launcher", "observe", "algorithms", "generation", "backends", "refit", "parallel-plans")

# A repository on a slow network disk or a driver that hangs must not delay a run for a line in its report.
_GIT_TIMEOUT_S = 2.0
_NVIDIA_TIMEOUT_S = 5.0

Versions = dict[str, str | int | bool | list[str] | dict[str, str] | None]


def collect_versions(repository: Path | None = None) -> Versions:
    """Collect what somebody else needs to repeat a run.

    Args:
        repository: a folder inside a git repository; the current directory by default.

    Returns:
        `collected_at` (ISO 8601, UTC), `python`, `platform`, `cpu` (its model), `cpu_count`, `memory_bytes`, `gpus`
        (name and memory of each; [] without `nvidia-smi`), `gpu_driver`, one version per main library and package of
        this project (None if not installed), `git_commit`, `git_dirty` and `git_diff_stat` (None outside a repository),
        and `packages`: every installed distribution with its version.
    """
    # Each file is parsed when it is asked for. A half-removed distribution has neither name nor version.
    known = [each.metadata for each in importlib.metadata.distributions()]
    found = {str(each["Name"]).lower(): str(each["Version"]) for each in known if each["Name"]}
    main = (*_LIBRARIES, *(f"rl-{name}" for name in _PACKAGES))
    memory = (_proc_field("/proc/meminfo", "MemTotal") or "").split()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    lines = (_output(query, timeout_s=_NVIDIA_TIMEOUT_S) or "").splitlines()
    gpus = [cells for line in lines if len(cells := [cell.strip() for cell in line.split(",")]) == 3]
    git = functools.partial(_output, timeout_s=_GIT_TIMEOUT_S, folder=repository)
    commit = git(["git", "rev-parse", "HEAD"])
    changes = None if commit is None else git(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "collected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "cpu_count": os.cpu_count(),
        "memory_bytes": 1024 * int(memory[0]) if memory and memory[0].isdigit() else None,
        "gpus": [f"{name}, {size}" for name, size, _ in gpus],
        "gpu_driver": gpus[0][2] if gpus else None,
        **{name: found.get(name) for name in main},
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "git_diff_stat": git(["git", "diff", "--stat", "HEAD"]) if changes else None,
        "packages": dict(sorted(found.items())),
    }


def write_origins(run: RunDirectory, origins: Mapping[str, object], *, recipe: object) -> None:
    """Write `str(origin)` by dotted key, without the credentials of `recipe`, since an origin may quote an override.

    Raises:
        RunDirectoryError: the disk refused it.
    """
    secrets = Secrets.of(recipe)
    written = {key: secrets.scrub(str(origin)) for key, origin in origins.items()}
    write_text(run.origins, json.dumps(written, indent=1, ensure_ascii=False))


def _proc_field(path: str, name: str) -> str | None:
    """Return the value of the first `name : value` line, or None on a system without the file."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), None)


def _output(command: list[str], *, timeout_s: float, folder: Path | None = None) -> str | None:
    try:
        answer = subprocess.run(  # noqa: S603 - a fixed command
            command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
