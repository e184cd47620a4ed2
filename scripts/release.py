"""Release one package: check it, raise its version, write its changelog, commit and tag.

    python scripts/release.py rl-refit minor            what `nox -s release` does after its checks have passed
    python scripts/release.py rl-refit minor --dry-run  only say whether it would be refused, and why

The first release has the version that the tree already names, whichever part is given. Nothing is pushed. The tag is
`<package>/v<version>`, and one release is one commit. Below 1.0 a minor release may break users, with a `changed` or
`removed` fragment; a patch may not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from repository import Repository, floor
from repository_url import url_refusals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from repository import Package


START = "<!-- towncrier release notes start -->"


def main() -> None:
    """Release, or exit with 2 and all the reasons."""
    repository = Repository.read(Path.cwd())
    parser = argparse.ArgumentParser(prog="nox -s release --", description=__doc__.splitlines()[0])
    parser.add_argument("package", choices=sorted(repository.packages))
    parser.add_argument("part", choices=["patch", "minor", "major"], help="of the version, to be raised")
    parser.add_argument("--dry-run", action="store_true", help="change nothing: refuse, or name the version")
    arguments = parser.parse_args()
    package = repository.packages[arguments.package]
    version = raised(package.version, arguments.part) if repository.releases(package.name) else package.version
    if reasons := [*refusals(repository, package, version=version, part=arguments.part)]:
        print(f"{package.name} {version} cannot be released:", *reasons, sep="\n  ", file=sys.stderr)
        sys.exit(2)
    if arguments.dry_run:
        print(f"{package.name} {version} may be released")
        return
    write_version(package, version)
    write_changelog(repository, package, version=version)
    tag = f"{package.name}/v{version}"
    repository.git("add", f"packages/{package.name}")
    repository.git("commit", "--quiet", "--message", f"release {package.name} v{version}")
    repository.git("tag", "--annotate", tag, "--message", f"{package.name} {version}")
    print(f"{tag} is tagged; to publish it: git push --follow-tags (.github/workflows/publish.yml does the rest)")


def raised(version: Version, part: str) -> Version:
    """Return the version after `version`."""
    major, minor, micro = version.release
    following = {"major": (major + 1, 0, 0), "minor": (major, minor + 1, 0), "patch": (major, minor, micro + 1)}
    return Version(".".join(map(str, following[part])))


def refusals(repository: Repository, package: Package, *, version: Version, part: str) -> Iterator[str]:
    """Yield the reasons why this release would mislead its users."""
    if repository.git("status", "--porcelain").strip():
        yield "the working tree has changes: commit or stash them, so that the tag holds what was tested"
    yield from url_refusals(repository)
    if not package.fragments():
        yield f"packages/{package.name}/changelog.d is empty: there is nothing to tell its users"
    if part == "patch" and version != package.version and (breaking := package.fragments("changed", "removed")):
        yield f"a patch may not change or remove ({', '.join(path.name for path in breaking)}): release a minor"
    for name, versions in repository.siblings(package.name).items():
        if floor(versions) not in repository.releases(name):
            yield f"it requires {name}{versions}, and {name} {floor(versions)} is not released: release {name} first"
    for name in repository.packages:
        above = repository.siblings(name)
        if package.name in above and version not in above[package.name]:
            yield f"{name} admits {package.name}{above[package.name]} only: widen it, or nobody can install both"


def write_version(package: Package, version: Version) -> None:
    """Set the version in `pyproject.toml`, and leave the rest of the file unchanged."""
    file = package.root / "pyproject.toml"
    text, count = re.subn(r'^version = ".*"$', f'version = "{version}"', file.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, f"{file} has no line 'version = ...'"
    file.write_text(text)


def write_changelog(repository: Repository, package: Package, *, version: Version) -> None:
    """Turn the fragments into a section of `CHANGELOG.md`, below its header."""
    file = package.root / "CHANGELOG.md"
    if START not in file.read_text():
        file.write_text(f"{file.read_text().rstrip()}\n\n{START}\n")
    config = ["--config", str(repository.root / "pyproject.toml"), "--dir", ".", "--name", package.name]
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", str(version), *config]
    subprocess.run(command, cwd=package.root, check=True, stdout=subprocess.DEVNULL)
    (package.root / "changelog.d").mkdir(exist_ok=True)  # git keeps no empty folder, and the next fragment needs it
    (package.root / "changelog.d" / ".gitkeep").touch()


if __name__ == "__main__":
    main()
