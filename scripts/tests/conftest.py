"""A repository of three toy packages for the tests of the scripts: roof stands on wall, wall on ground."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from repository import Repository
from repository_url import write_url

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
dependencies = {dependencies}

[dependency-groups]
test = ["pytest>=8"]

[[tool.matrix.cells]]
python = "3.11"
torch = "2.12"

[[tool.matrix.cells]]
python = "3.11"
torch = "2.13"
"""
DEPENDENCIES = {"ground": ["torch>=2.9"], "wall": ["ground>=0.1.0,<0.2"], "roof": ["rich", "wall>=0.1.0,<0.2"]}


URL = "https://example.org/somebody/toys"


@pytest.fixture(autouse=True)
def no_workflow(monkeypatch):
    """The tests mean the same in a workflow, which says where it runs."""
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)


@pytest.fixture
def git(tmp_path):
    """Run git in the toy repository, as somebody."""

    def run(*arguments: str) -> str:
        somebody = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        command = ["git", *somebody, *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    return run


@pytest.fixture
def root(tmp_path, git):
    """A committed repository in `tmp_path`."""
    for name, dependencies in DEPENDENCIES.items():
        package = tmp_path / "packages" / name
        (package / "src" / name).mkdir(parents=True)
        (package / "changelog.d").mkdir()
        (package / "pyproject.toml").write_text(PYPROJECT.format(name=name, dependencies=dependencies))
        (package / "src" / name / "__init__.py").write_text(f'"""The {name}."""\n')
        (package / "changelog.d" / "+first.added.md").write_text("Stand.\n")
        (package / "CHANGELOG.md").write_text(f"# Changelog of {name}\n")
    (tmp_path / "pyproject.toml").write_text((HERE.parent.parent / "pyproject.toml").read_text())
    write_url(Repository.read(tmp_path), URL)
    git("init", "--quiet", "--initial-branch=main")
    git("config", "user.name", "Somebody")
    git("config", "user.email", "somebody@example.org")
    git("remote", "add", "origin", f"{URL}.git")
    git("add", ".")
    git("commit", "--quiet", "--message", "Build a toy repository")
    return tmp_path
