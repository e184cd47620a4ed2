"""Which nox sessions a change needs, as the matrix of a CI workflow.

    nox --list --json | python scripts/ci_matrix.py origin/main    what the difference from origin/main needs
    nox --list --json | python scripts/ci_matrix.py                everything, as for a first push (base 000...)

A session that is tagged with a package runs if that package, or one that it depends on, changed. Sessions of the whole
repository always run. A change outside `packages/` may affect everything, so it runs everything.
Prints one line of JSON: `{"include": [{"session": ..., "python": ...}, ...]}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterable

OWN_PYTHON = "3.13"
"""For sessions that run on nox's own Python: the newest one, since the others run on the matrix's."""


def main() -> None:
    """Read the sessions from stdin and print those to run."""
    repository = Repository.read(Path.cwd())
    sessions = json.load(sys.stdin)
    affected = set(repository.packages)
    for base in sys.argv[1:]:
        if base.strip("0"):
            affected = affected_packages(
                repository, repository.git("diff", "--name-only", f"{base}...HEAD").splitlines()
            )
    print(json.dumps(matrix(sessions, affected=affected, packages=repository.packages)))


def affected_packages(repository: Repository, changed_paths: Iterable[str]) -> set[str]:
    """Return the packages that the changed files may affect: their own, and all that depend on it."""
    affected: set[str] = set()
    for path in changed_paths:
        match Path(path).parts:
            case ("packages", name, *_) if name in repository.packages:
                affected.update(repository.dependents(name))
            case _:
                return set(repository.packages)
    return affected


def matrix(
    sessions: Iterable[dict[str, Any]], *, affected: set[str], packages: Iterable[str]
) -> dict[str, list[dict[str, str]]]:
    """Return one job for each session of an affected package or of the whole repository."""
    known = set(packages)
    wanted = (session for session in sessions if not (tagged := known & set(session["tags"])) or tagged & affected)
    return {
        "include": [{"session": each["session"], "python": each["python"] or OWN_PYTHON} for each in wanted],
    }


if __name__ == "__main__":
    main()
