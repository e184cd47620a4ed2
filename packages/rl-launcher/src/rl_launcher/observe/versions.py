"""What a run was made with: versions of the software, the platform, and the commit.

It does not know secrets: no environment variable, host name, user name or command line is read.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["collect_versions"]

_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "tokenizers",
    "megatron-core",
    "rl-launcher",
    "rl-algorithms",
    "rl-generation",
    "rl-backends",
    "rl-refit",
    "rl-parallel-plans",
)

# A repository on a slow network disk must not hold up a run for a line in its report.
_GIT_TIMEOUT_S = 2.0


def collect_versions(repository: Path | None = None) -> dict[str, str | int | bool | None]:
    """Collect what somebody else needs to repeat a run.

    Args:
        repository: a folder inside a git repository; the current directory by default.

    Returns:
        `collected_at` (ISO 8601, UTC), `python`, `platform`, `cpu_count`, one entry a distribution (its version, or
        None where it is not installed), `git_commit` and `git_dirty` (both None outside a repository).
    """
    commit = _git(repository, "rev-parse", "HEAD")
    changes = None if commit is None else _git(repository, "status", "--porcelain", "--untracked-files=no")
    return {
        "collected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        **{name: _installed_version(name) for name in _DISTRIBUTIONS},
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
    }


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(repository: Path | None, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(  # noqa: S603 - fixed words
            ["git", *arguments],  # noqa: S607 - the user's own git
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
