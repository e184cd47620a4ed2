"""Tests of try_wheel.py: what it notices in an environment and in a README."""

import pytest

from try_wheel import first_program, loaded_modules, readme_failure, unwanted_distributions


def test_an_installed_distribution_that_should_be_absent_is_reported_whatever_its_spelling():
    assert "is installed" in unwanted_distributions(["PyTest"])[0]
    assert unwanted_distributions(["no-such-distribution"]) == []


def test_a_module_that_the_import_loads_is_reported():
    assert loaded_modules("json.tool", ["json", "sqlite3"]) == [
        "`import json.tool` loads json: import it where it is used"
    ]
    assert "No module named" in loaded_modules("no_such_module", [])[0]


def test_the_first_python_block_is_the_program():
    markdown = "# x\n\n```bash\nls\n```\n\n```python\nprint(1)\n```\n\n```python\nprint(2)\n```\n"
    assert first_program(markdown) == "print(1)\n"
    assert first_program("```text\nno program\n```\n") is None


@pytest.mark.parametrize(("program", "ends_well"), [("print(1)", True), ("raise SystemExit(3)", False)])
def test_a_readme_holds_when_its_program_ends_well(tmp_path, program, ends_well):
    readme = tmp_path / "README.md"
    readme.write_text(f"```python\n{program}\n```\n")
    assert (readme_failure(readme) == []) is ends_well


def test_a_readme_without_a_program_fails(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# x\n")
    assert "nothing to run" in readme_failure(readme)[0]
