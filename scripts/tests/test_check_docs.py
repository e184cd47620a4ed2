"""Tests of check_docs.py: links, anchors and public names."""

import pytest

from check_docs import anchors, check_links, check_matrix, check_public_names, table_names
from repository import Package, Repository


@pytest.fixture
def page(tmp_path):
    (tmp_path / "other.md").write_text("# Other page\n\n## What it costs\n\n## What it costs\n")
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    "text",
    [
        "[a](other.md) [b](other.md#what-it-costs) [c](other.md#what-it-costs-1)",
        "# Here\n[a](#here) [web](https://example.org/nowhere.md)",
        "`[a](nowhere.md)`\n\n```text\n[a](nowhere.md)\n```\n",
    ],
)
def test_links_that_lead_somewhere_pass(page, text):
    page.write_text(text)
    assert list(check_links(page)) == []


@pytest.mark.parametrize("target", ["nowhere.md", "other.md#nowhere", "#nowhere", "../nowhere/"])
def test_links_that_lead_nowhere_are_reported(page, target):
    page.write_text(f"see [there]({target})")
    assert [target in complaint for complaint in check_links(page)] == [True]


def test_anchors_are_spelt_as_on_the_web():
    assert anchors("# `plan_for`: a plan, explained\n") == {"plan_for-a-plan-explained"}


def test_public_names_are_read_without_their_arguments():
    table = "## Public names\n\n| name | what |\n|---|---|\n| `f(x)`, `g` | both `h` |\n\n## Next\n\n| `k` |\n"
    assert table_names(table) == ({"f", "g"}, {"f", "g", "h"})


def test_the_table_and_the_exports_must_agree(root):
    package = Repository.read(root).packages["wall"]
    (package.root / "src/wall/__init__.py").write_text("def build(): ...\n\n__all__ = ['build']\n")
    (package.root / "src/wall/bricks.py").write_text("size = 1\n")
    readme = package.root / "README.md"
    readme.write_text("# wall\n\n## Public names\n\n| name |\n|---|\n| `build()` |\n| `bricks.size` |\n")
    assert list(check_public_names(package)) == []
    readme.write_text("# wall\n\n## Public names\n\n| name |\n|---|\n| `bricks.weight` |\n| `tear_down` |\n")
    complaints = "\n".join(check_public_names(package))
    assert "lacks build" in complaints
    assert "has bricks.weight" in complaints
    assert "has tear_down" in complaints


@pytest.mark.parametrize(("row", "differing"), [("2.13 | 5.18, 5.19", []), ("2.13 | 5.18", ["5.19"])])
def test_the_readme_promises_what_the_matrix_tests(tmp_path, row, differing):
    cells = [{"python": "3.11", "torch": "2.13", "transformers": minor} for minor in ("5.18", "5.19")]
    package = Package(tmp_path, {"project": {"name": "rl-thing"}, "tool": {"matrix": {"cells": cells}}})
    (tmp_path / "README.md").write_text(f"| rl-thing | {row} |\n| [rl-thing](x) | 9.9 |\n")
    assert [each in complaint for each, complaint in zip(differing, check_matrix(package, tmp_path), strict=True)] == [
        True for _ in differing
    ]
