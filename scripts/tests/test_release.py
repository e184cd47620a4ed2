"""Tests of release.py, on a real repository of toy packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from repository import Repository

SCRIPT = str(Path(__file__).resolve().parent.parent / "release.py")


@pytest.fixture
def release(root):
    def run(package: str, part: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, SCRIPT, package, part, *options]
        return subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)

    return run


def add_fragment(root, git, name: str, kind: str = "added") -> None:
    fragments = root / f"packages/{name}/changelog.d"
    fragments.mkdir(exist_ok=True)  # git removes it with its last file
    (fragments / f"+more.{kind}.md").write_text("Do more.\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "Do more")


def test_the_first_release_is_the_version_in_the_tree_and_later_ones_raise_it(root, git, release):
    assert release("ground", "minor").returncode == 0
    add_fragment(root, git, "ground")
    assert release("ground", "patch").returncode == 0
    assert [str(version) for version in Repository.read(root).releases("ground")] == ["0.1.1", "0.1.0"]
    assert git("status", "--porcelain") == ""
    changelog = (root / "packages/ground/CHANGELOG.md").read_text()
    assert changelog.startswith("# Changelog of ground\n")
    assert changelog.index("## [0.1.1]") < changelog.index("- Do more.") < changelog.index("## [0.1.0]")
    assert git("log", "-1", "--format=%s").strip() == "release ground v0.1.1"
    assert (root / "packages/ground/changelog.d/.gitkeep").is_file()  # the folder is there for the next fragment


def test_a_dry_run_refuses_or_names_the_version_and_changes_nothing(root, git, release):
    before = git("rev-parse", "HEAD")
    tried = release("ground", "minor", "--dry-run")
    assert (tried.returncode, tried.stdout) == (0, "ground 0.1.0 may be released\n")
    assert release("wall", "minor", "--dry-run").returncode == 2
    assert (git("rev-parse", "HEAD"), git("tag")) == (before, "")


def leave_origin(root) -> None:
    subprocess.run(["git", "remote", "remove", "origin"], cwd=root, check=True)


@pytest.mark.parametrize(
    ("package", "part", "prepare", "reason"),
    [
        ("ground", "minor", lambda root: (root / "new.txt").write_text("x"), "the working tree has changes"),
        ("wall", "minor", None, "ground 0.1.0 is not released: release ground first"),
        ("ground", "minor", leave_origin, "no remote `origin` nor GITHUB_REPOSITORY"),
    ],
)
def test_an_unfit_release_is_refused_and_changes_nothing(root, git, release, package, part, prepare, reason):
    before = git("rev-parse", "HEAD")
    if prepare:
        prepare(root)
    refused = release(package, part)
    assert refused.returncode == 2
    assert reason in refused.stderr
    assert git("rev-parse", "HEAD") == before
    assert git("tag") == ""


def test_a_release_without_news_is_refused(release):
    assert release("ground", "minor").returncode == 0
    assert "there is nothing to tell" in release("ground", "patch").stderr


def test_a_patch_that_breaks_is_refused(root, git, release):
    assert release("ground", "minor").returncode == 0
    add_fragment(root, git, "ground", kind="removed")
    assert "release a minor" in release("ground", "patch").stderr


def test_a_version_that_nobody_above_admits_is_refused(root, git, release):
    assert release("ground", "minor").returncode == 0
    add_fragment(root, git, "ground")
    assert "wall admits ground<0.2,>=0.1.0 only" in release("ground", "minor").stderr
