"""Tests of check_docs.py: links, anchors and public names."""

import pytest

from check_docs import anchors, check_links, check_matrix, check_public_names, matrix_table, table_names, write_matrix
from repository import Repository


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


def test_the_readme_promises_what_the_matrix_tests(root):
    pyproject = root / "packages/wall/pyproject.toml"
    newest = '\n[[tool.matrix.cells]]\npython = "3.13"\ntorch = "2.15"\nray = "2.60"\n'
    floors = '\n[[tool.matrix.cells]]\npython = "3.11"\ntorch = "2.9"\nresolution = "lowest-direct"\n'
    pyproject.write_text(f"{pyproject.read_text()}{newest}{floors}")
    readme = root / "README.md"
    readme.write_text("# toys\n")
    assert "no table of tested versions" in "".join(check_matrix(Repository.read(root)))
    readme.write_text("# toys\n\n<!-- matrix -->\n| wall | 9.9 |\n<!-- /matrix -->\n\nMore.\n")
    (complaint,) = check_matrix(Repository.read(root))
    assert "| wall | 9.9 |" in complaint
    write_matrix(Repository.read(root))
    assert list(check_matrix(Repository.read(root))) == []
    row = "| wall | 3.11, 3.13 | 2.9, 2.12, 2.13, 2.15 | – | Ray 2.60; all that it needs at its floor |"
    assert row in readme.read_text().splitlines()
    assert readme.read_text().endswith("<!-- /matrix -->\n\nMore.\n")
    assert "never ran" not in readme.read_text()


def test_a_cell_that_never_ran_is_listed_apart_and_promised_by_no_row(root):
    pyproject = root / "packages/wall/pyproject.toml"
    newest = '\n[[tool.matrix.cells]]\npython = "3.13"\ntorch = "2.15"\nnever_run = true\n'
    pyproject.write_text(f"{pyproject.read_text()}{newest}")
    lines = matrix_table(Repository.read(root)).splitlines()
    assert "| wall | 3.11 | 2.12, 2.13 | – | – |" in lines
    assert [line for line in lines if line.startswith("-")] == ["- wall: `3.13-torch2.15`"]
