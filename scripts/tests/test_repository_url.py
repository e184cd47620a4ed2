"""Tests of repository_url.py: one setting, and no release that names another place."""

import subprocess
import sys
from pathlib import Path

import pytest

from repository import Repository
from repository_url import differing, url_of, url_refusals, web_address, write_url

HERE = Path(__file__).resolve().parents[2]
URL = "https://example.org/somebody/toys"
"""Of the toy repository."""


@pytest.mark.parametrize(
    "remote",
    [
        "https://example.org/somebody/toys",
        "https://example.org/somebody/toys.git",
        "https://token:x@example.org/somebody/toys.git",
        "git@example.org:somebody/toys.git",
        "ssh://git@example.org:2222/somebody/toys",
    ],
)
def test_a_remote_in_any_spelling_is_the_page_on_the_web(remote):
    assert web_address(remote) == URL


def test_a_clone_of_what_is_set_may_be_released(root):
    assert list(url_refusals(Repository.read(root))) == []


def test_nothing_is_released_while_the_url_is_not_set(root):
    write_url(Repository.read(root), "https://not-set.invalid/toys")
    (reason,) = url_refusals(Repository.read(root))
    assert "is not set" in reason
    assert f"seems to be {URL}" in reason


def test_nothing_is_released_from_a_clone_of_another_repository(root, git, monkeypatch):
    git("remote", "set-url", "origin", "git@example.org:somebody/fork.git")
    (reason,) = url_refusals(Repository.read(root))
    assert "this clone comes from https://example.org/somebody/fork" in reason
    git("remote", "remove", "origin")
    (reason,) = url_refusals(Repository.read(root))
    assert "no remote `origin` nor GITHUB_REPOSITORY" in reason
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://example.org")
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/toys")
    assert list(url_refusals(Repository.read(root))) == []


def test_setting_it_once_writes_it_into_every_package(root):
    pyproject = root / "packages/wall/pyproject.toml"
    pyproject.write_text(f'{pyproject.read_text()}\n[project.urls]\nSource = "{URL}"\nIssues = "{URL}/issues"\n')
    write_url(Repository.read(root), "https://example.org/new/place")
    moved = Repository.read(root)
    assert url_of(moved) == "https://example.org/new/place"
    assert moved.packages["wall"].pyproject["project"]["urls"]["Issues"] == "https://example.org/new/place/issues"
    assert list(differing(moved)) == []


def test_a_package_that_names_another_place_is_found(root):
    pyproject = root / "packages/wall/pyproject.toml"
    pyproject.write_text(f'{pyproject.read_text()}\n[project.urls]\nSource = "https://example.org/elsewhere"\n')
    (complaint,) = differing(Repository.read(root))
    assert "wall names https://example.org/elsewhere" in complaint


def test_the_command_refuses_with_2_and_says_why(root, git):
    git("remote", "set-url", "origin", "https://example.org/somebody/fork")
    command = [sys.executable, str(HERE / "scripts/repository_url.py")]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    assert (done.returncode, "comes from" in done.stdout) == (2, True)


def test_every_package_of_this_repository_names_the_one_setting():
    assert list(differing(Repository.read(HERE))) == []
    assert all("Source" in each.pyproject["project"]["urls"] for each in Repository.read(HERE).packages.values())
