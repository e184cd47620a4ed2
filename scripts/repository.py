"""The packages of this repository, read from `packages/*/pyproject.toml`, their changelogs and git.

`Package` is one of them; `Repository` knows which depends on which, and what has been released.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dependency_groups import resolve
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping


RELEASE = re.compile(r"^## \[(\d[^\]]*)\]", flags=re.MULTILINE)
"""The title of a release in a changelog, as towncrier writes it (`title_format` in the root `pyproject.toml`)."""


@dataclass(frozen=True)
class Package:
    """A directory under `packages/`, as its `pyproject.toml` describes it."""

    root: Path
    pyproject: dict[str, Any]

    @classmethod
    def read(cls, root: Path) -> Package:
        """Read the package whose `pyproject.toml` is in `root`."""
        return cls(root=root, pyproject=tomllib.loads((root / "pyproject.toml").read_text()))

    @property
    def name(self) -> str:
        """The name of the distribution and of the directory: `rl-refit`."""
        return str(self.pyproject["project"]["name"])

    @property
    def import_name(self) -> str:
        """The name to import: `rl_refit`."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> Version:
        """The version in the tree, released or not."""
        return Version(self.pyproject["project"]["version"])

    @cached_property
    def requirements(self) -> dict[str, Requirement]:
        """The dependencies by name, without extras."""
        requirements = map(Requirement, self.pyproject["project"].get("dependencies", []))
        return {requirement.name: requirement for requirement in requirements}

    def optional_dependencies(self, name: str) -> list[str]:
        """Return the requirements of an extra such as `megatron`."""
        return list(self.pyproject["project"]["optional-dependencies"][name])

    def group(self, name: str) -> list[str]:
        """Return the requirements of a dependency group such as `test`; none if there is no such group."""
        return group(self.pyproject, name)

    def fragments(self, *kinds: str) -> list[Path]:
        """Return the changelog fragments for the next release, of `kinds` (`added`, `removed`, ...) or of all."""
        found = sorted((self.root / "changelog.d").glob("*.*.md"))
        return [path for path in found if not kinds or path.name.split(".")[-2] in kinds]

    @property
    def cells(self) -> list[dict[str, str]]:
        """The cells of the matrix; the last one is the quick one, which a plain `nox` runs."""
        cells = self.pyproject["tool"]["matrix"]["cells"]
        return [{name: value for name, value in cell.items() if name != "never_run"} for cell in cells]

    @property
    def never_run(self) -> list[dict[str, str]]:
        """The cells marked `never_run = true`: no machine of the project has run them to their end so far."""
        marks = [cell.get("never_run", False) for cell in self.pyproject["tool"]["matrix"]["cells"]]
        return [cell for cell, marked in zip(self.cells, marks, strict=True) if marked]


@dataclass(frozen=True)
class Repository:
    """All packages of one checkout."""

    root: Path
    packages: dict[str, Package]

    @classmethod
    def read(cls, root: Path) -> Repository:
        """Read the checkout in `root`."""
        found = (Package.read(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml")))
        return cls(root=root, packages={package.name: package for package in found})

    def with_released(self, *packages: Package) -> Repository:
        """Return the same repository with `packages`, read from elsewhere, instead of those of the same names."""
        return Repository(root=self.root, packages=self.packages | {package.name: package for package in packages})

    def siblings(self, name: str) -> dict[str, SpecifierSet]:
        """Return the packages of this repository that `name` requires directly, with the versions that it admits."""
        return admitted(self.packages[name], self.packages)

    def closure(self, *names: str) -> list[str]:
        """Return `names` and every package of this repository that they depend on, lowest first."""
        ordered: dict[str, None] = {}
        for name in names:
            ordered |= dict.fromkeys([*self.closure(*self.siblings(name)), name])
        return list(ordered)

    def dependents(self, name: str) -> list[str]:
        """Return `name` and every package of this repository that depends on it."""
        return [other for other in self.packages if name in self.closure(other)]

    def third_parties(self, *names: str) -> set[str]:
        """Return the third-party dependencies of `names` and of every package that they depend on."""
        declared = {requirement for name in self.closure(*names) for requirement in self.packages[name].requirements}
        return declared - self.packages.keys()

    def newest(self, *names: str) -> dict[str, str]:
        """Merge the quick cells of `names` and of all that they depend on, without what they do not declare."""
        merged: dict[str, str] = {}
        for name in self.closure(*names):
            merged |= self.packages[name].cells[-1]
        return {name: minor for name, minor in merged.items() if name in self.third_parties(*names)}

    def releases(self, name: str) -> list[Version]:
        """Return the versions of `name` that were released, newest first.

        A release has a section in the changelog and a tag `<name>/v<version>`. Either is enough: a clone without tags
        still holds everything against what was released.
        """
        tags = self.git("tag", "--list", f"{name}/v*").split()
        changelog = self.root / "packages" / name / "CHANGELOG.md"
        sections = RELEASE.findall(changelog.read_text()) if changelog.is_file() else []
        versions = {Version(found) for found in [*(tag.removeprefix(f"{name}/v") for tag in tags), *sections]}
        return sorted(versions, reverse=True)

    def commit_of(self, name: str, version: Version) -> str:
        """Return what git knows a release by: its tag, or the commit that wrote its section of the changelog.

        Raises ValueError if there is neither, as in a clone that lacks the older commits.
        """
        tag = f"{name}/v{version}"
        if self.git("tag", "--list", tag).strip():
            return tag
        title, changelog = f"## [{version}]", f"packages/{name}/CHANGELOG.md"
        if self.git("rev-parse", "--is-shallow-repository").strip() == "true":
            raise ValueError(f"this clone is shallow and has no tag {tag}: git fetch --unshallow --tags")
        commits = self.git("log", "--reverse", "--format=%H", f"-S{title}", "--", changelog).split()
        if not commits:
            raise ValueError(f"there is no tag {tag}, and no commit that adds {title!r} to {changelog}")
        return commits[0]

    def checkout(self, name: str, version: Version, target: Path) -> Package:
        """Unpack the released `name` under `target`, and read it there."""
        tree = target.resolve() / f"{name}-{version}"
        archive = self._git("archive", "--format=tar", self.commit_of(name, version), f"packages/{name}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        return Package.read(tree / "packages" / name)

    def git(self, *arguments: str) -> str:
        """Run `git` at the root of the repository, and return what it prints."""
        return self._git(*arguments).decode()

    def _git(self, *arguments: str) -> bytes:
        # In a container the checkout often belongs to another user, which git refuses by default.
        command = ("git", "-c", f"safe.directory={self.root}", *arguments)
        return subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.PIPE).stdout


def cell_id(cell: Mapping[str, str]) -> str:
    """Return the name of a cell in its session's name: `3.11-torch2.13`."""
    plain = ("python", "resolution")
    return "-".join(value if name in plain else f"{name}{value}" for name, value in cell.items())


def group(pyproject: Mapping[str, Any], name: str) -> list[str]:
    """Return the requirements of a dependency group of a `pyproject.toml`; none if there is no such group."""
    groups = pyproject.get("dependency-groups", {})
    return list(resolve(groups, name)) if name in groups else []


def admitted(package: Package, names: Mapping[str, Package]) -> dict[str, SpecifierSet]:
    """Return those of `names` that `package` requires directly, with the versions that it admits."""
    return {name: asked.specifier for name, asked in package.requirements.items() if name in names}


def floor(versions: SpecifierSet) -> Version:
    """Return the lowest version that `versions` admits; ValueError if it has no `>=`."""
    floors = [Version(bound.version) for bound in versions if bound.operator == ">="]
    if not floors:
        message = f"the bound {str(versions)!r} has no '>=': write the oldest version that works, as in '>=0.1.0,<0.2'"
        raise ValueError(message)
    return max(floors)
