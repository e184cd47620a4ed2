"""What the repository says about itself: its packages, who stands on whom, their matrices, their releases.

Reads `packages/*/pyproject.toml` and git tags; it installs nothing and knows neither nox nor CI.
"""

from __future__ import annotations

import io
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


@dataclass(frozen=True)
class Package:
    """One directory under `packages/`, as its `pyproject.toml` describes it."""

    root: Path
    pyproject: dict[str, Any]

    @classmethod
    def read(cls, root: Path) -> Package:
        """Read the package whose `pyproject.toml` lies in `root`."""
        return cls(root=root, pyproject=tomllib.loads((root / "pyproject.toml").read_text()))

    @property
    def name(self) -> str:
        """The distribution's name, which is also the directory's: `rl-refit`."""
        return str(self.pyproject["project"]["name"])

    @property
    def import_name(self) -> str:
        """What one imports: `rl_refit`."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> Version:
        """The version in the tree, released or not."""
        return Version(self.pyproject["project"]["version"])

    @cached_property
    def requirements(self) -> dict[str, Requirement]:
        """What an installation pulls in, by name; extras left out."""
        requirements = map(Requirement, self.pyproject["project"].get("dependencies", []))
        return {requirement.name: requirement for requirement in requirements}

    def optional_dependencies(self, name: str) -> list[str]:
        """The requirements of an extra, `megatron` for one."""
        return list(self.pyproject["project"]["optional-dependencies"][name])

    def group(self, name: str) -> list[str]:
        """The requirements of a dependency group, `test` for one; none where the package has no such group."""
        return group(self.pyproject, name)

    def fragments(self, *kinds: str) -> list[Path]:
        """The changelog fragments that wait for a release, of `kinds` (`added`, `removed`, ...) or of all."""
        found = sorted((self.root / "changelog.d").glob("*.*.md"))
        return [path for path in found if not kinds or path.name.split(".")[-2] in kinds]

    @property
    def cells(self) -> list[dict[str, str]]:
        """The points of the matrix, oldest first; the last one is the quick one."""
        return list(self.pyproject["tool"]["matrix"]["cells"])


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
        """The same repository, in which `packages`, read from elsewhere, stand in for those of their names."""
        return Repository(root=self.root, packages=self.packages | {package.name: package for package in packages})

    def siblings(self, name: str) -> dict[str, SpecifierSet]:
        """The packages of this repository that `name` requires directly, and the versions that it admits of each."""
        return admitted(self.packages[name], self.packages)

    def closure(self, *names: str) -> list[str]:
        """`names` and every package of this repository below them, lowest first."""
        ordered: dict[str, None] = {}
        for name in names:
            ordered |= dict.fromkeys([*self.closure(*self.siblings(name)), name])
        return list(ordered)

    def dependents(self, name: str) -> list[str]:
        """`name` and every package of this repository that stands on it."""
        return [other for other in self.packages if name in self.closure(other)]

    def third_parties(self, *names: str) -> set[str]:
        """Names of what an installation of `names` declares, over the whole closure, without our own packages."""
        declared = {requirement for name in self.closure(*names) for requirement in self.packages[name].requirements}
        return declared - self.packages.keys()

    def newest(self, *names: str) -> dict[str, str]:
        """The quick cells of `names` and of all below them in one, as far as an installation of them declares."""
        merged: dict[str, str] = {}
        for name in self.closure(*names):
            merged |= self.packages[name].cells[-1]
        return {name: minor for name, minor in merged.items() if name in self.third_parties(*names)}

    def releases(self, name: str) -> list[Version]:
        """The versions of `name` that have a tag `<name>/v<version>`, newest first."""
        tags = self.git("tag", "--list", f"{name}/v*").split()
        return sorted((Version(tag.removeprefix(f"{name}/v")) for tag in tags), reverse=True)

    def checkout(self, name: str, version: Version, target: Path) -> Package:
        """Unpack `name` under `target` as its tag holds it, and read it there."""
        tree = target.resolve() / f"{name}-{version}"
        archive = self._git("archive", "--format=tar", f"{name}/v{version}", f"packages/{name}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(tree, filter="data")
        return Package.read(tree / "packages" / name)

    def git(self, *arguments: str) -> str:
        """What `git` prints, run at the root of the repository."""
        return self._git(*arguments).decode()

    def _git(self, *arguments: str) -> bytes:
        # In a container the checkout often belongs to another user, which git refuses unless told.
        command = ("git", "-c", f"safe.directory={self.root}", *arguments)
        return subprocess.run(command, cwd=self.root, check=True, stdout=subprocess.PIPE).stdout


def group(pyproject: Mapping[str, Any], name: str) -> list[str]:
    """The requirements of a dependency group of a `pyproject.toml`; none where it has no such group."""
    groups = pyproject.get("dependency-groups", {})
    return list(resolve(groups, name)) if name in groups else []


def admitted(package: Package, names: Mapping[str, Package]) -> dict[str, SpecifierSet]:
    """Those of `names` that `package` requires directly, and the versions that it admits of each."""
    return {name: asked.specifier for name, asked in package.requirements.items() if name in names}


def floor(versions: SpecifierSet) -> Version:
    """The lowest version that `versions` admits; ValueError when there is no `>=` in it."""
    floors = [Version(bound.version) for bound in versions if bound.operator == ">="]
    if not floors:
        message = f"the bound {str(versions)!r} has no '>=': write the oldest version that works, as in '>=0.1.0,<0.2'"
        raise ValueError(message)
    return max(floors)
