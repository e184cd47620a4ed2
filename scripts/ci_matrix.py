"""Which nox sessions a change needs, as the matrix of a CI workflow.

    nox --list --json | python scripts/ci_matrix.py origin/main    what differs from origin/main needs
    nox --list --json | python scripts/ci_matrix.py                all of it, as for a first push (base 000...)

A session that is tagged with a package runs when that package, or one below it, changed; the sessions of the whole
repository run always. A change outside `packages/` may concern everything, so it runs everything.
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


def main() -> None:
    """Read the sessions from stdin and print those to run."""
    repository = Repository.read(Path.cwd())
    sessions = json.load(sys.stdin)
    affected = set(repository.packages)
    for base in sys.argv[1:]:
        if base.strip("0"):
            affected = affected_packages(repository, repository.git("diff", "--name-only", f"{base}...HEAD").splitlines())
    print(json.dumps(matrix(sessions, affected=affected, packages=repository.packages)))


def affected_packages(repository: Repository, changed_paths: Iterable[str]) -> set[str]:
    """The packages whose behaviour the changed files may have changed: their own, and all that stand on it."""
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
    """One job for each session that concerns an affected package or the whole repository."""
    known = set(packages)
    wanted = (session for session in sessions if not (tagged := known & set(session["tags"])) or tagged & affected)
    return {"include": [{"session": session["session"], "python": session["python"]} for session in wanted]}


if __name__ == "__main__":
    main()
