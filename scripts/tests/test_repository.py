"""Tests of repository.py: what the packages' files and the tags say."""

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repository import Repository, floor


def test_closure_holds_everything_below_lowest_first(root):
    repository = Repository.read(root)
    assert repository.closure("roof") == ["ground", "wall", "roof"]
    assert repository.closure("wall", "roof") == ["ground", "wall", "roof"]
    assert repository.closure() == []


def test_dependents_hold_everything_above(root):
    repository = Repository.read(root)
    assert set(repository.dependents("ground")) == {"ground", "wall", "roof"}
    assert repository.dependents("roof") == ["roof"]


def test_third_parties_are_those_of_the_whole_closure(root):
    assert Repository.read(root).third_parties("roof") == {"rich", "torch"}


def test_the_newest_cell_pins_what_is_declared_and_nothing_else(root):
    pyproject = root / "packages/roof/pyproject.toml"
    pyproject.write_text(pyproject.read_text() + 'rich = "14.1"\nvllm = "0.30"\n')
    assert Repository.read(root).newest("roof") == {"torch": "2.13", "rich": "14.1"}


def test_releases_are_sorted_as_versions_not_as_text(root, git):
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        git("tag", f"wall/v{version}")
    git("tag", "roof/v7.0.0")
    assert [str(version) for version in Repository.read(root).releases("wall")] == ["0.10.0", "0.9.0", "0.2.0"]


def test_a_checkout_holds_what_the_tag_held(root, git, tmp_path):
    git("tag", "wall/v0.1.0")
    source = root / "packages/wall/src/wall/__init__.py"
    source.write_text("changed = True\n")
    released = Repository.read(root).checkout("wall", Version("0.1.0"), tmp_path / "shelf")
    assert "changed" not in (released.root / "src/wall/__init__.py").read_text()
    assert Repository.read(root).with_released(released).packages["wall"].root == released.root


def test_the_floor_of_a_bound_is_its_lowest_version():
    assert floor(SpecifierSet(">=0.2.1,<0.3")) == Version("0.2.1")
    with pytest.raises(ValueError, match="has no '>='"):
        floor(SpecifierSet("<0.3"))


def test_a_release_is_known_by_its_changelog_where_tags_are_lost(root, git, tmp_path):
    changelog = root / "packages/wall/CHANGELOG.md"
    changelog.write_text("# Changelog of wall\n\n## [0.1.0] - 2026-01-01\n\n- Stand.\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "release wall v0.1.0")
    (root / "packages/wall/src/wall/__init__.py").write_text("changed = True\n")
    changelog.write_text(f"{changelog.read_text()}\nMore words.\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "Go on")
    repository = Repository.read(root)
    assert git("tag") == ""
    assert repository.releases("wall") == [Version("0.1.0")]
    assert repository.commit_of("wall", Version("0.1.0")) == git("rev-parse", "HEAD~1").strip()
    released = repository.checkout("wall", Version("0.1.0"), tmp_path / "shelf")
    assert "changed" not in (released.root / "src/wall/__init__.py").read_text()
    with pytest.raises(ValueError, match=r"there is no tag wall/v9\.0\.0, and no commit that adds"):
        repository.commit_of("wall", Version("9.0.0"))


def test_a_cell_that_never_ran_is_marked_and_no_pin(root):
    pyproject = root / "packages/wall/pyproject.toml"
    pyproject.write_text(pyproject.read_text() + "never_run = true\n")
    wall = Repository.read(root).packages["wall"]
    assert wall.never_run == [wall.cells[-1]] == [{"python": "3.11", "torch": "2.13"}]
