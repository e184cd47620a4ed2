"""A trial of releases: two packages of this repository are released in a scratch clone, and then something breaks.

rl-backends stands on rl-parallel-plans. Without a break `floor-rl-backends` and `regression-rl-parallel-plans` run the
tests over what was released, and pass; each break is named by the session that is there for it. One test of rl-backends
stands for all: its README's first program, which prints losses and gradient norms.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]
URL = "https://example.org/somebody/rl-stack"
LOWER, UPPER = "rl-parallel-plans", "rl-backends"
ONE_TEST = ("--", "-k", "first_program", "-p", "no:cacheprovider")
FUNCTION = "get_grad_norm"
RESHARD = "from rl_parallel_plans.checkpoints import reshard\n"
"""A line of rl-backends below which another import fits."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("nox", "towncrier"))), reason="nox -s scripts installs nox and towncrier"
    ),
]


class Clone:
    """A clone of the last commit, whose two packages can be released, changed and tested."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTEST_ADDOPTS"}}
        return subprocess.run(
            command,
            check=False,
            cwd=self.root,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def must(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
        return done.stdout

    def nox(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "nox", *arguments)

    def commit(self, message: str) -> None:
        self.must("git", "add", "--all")
        self.must("git", "commit", "--quiet", "--message", message)

    def release(self, name: str, part: str = "minor") -> str:
        return self.must(sys.executable, "scripts/release.py", name, part)

    def change(self, path: str, before: str, after: str, *, times: int = 1) -> None:
        file = self.root / path
        text = file.read_text(encoding="utf-8")
        assert text.count(before) == times, f"{path} has {text.count(before)} times {before!r}"
        file.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Both packages in their first release, made by the command that the project releases with."""
    clone = Clone(tmp_path_factory.mktemp("trial") / "rl-stack")
    subprocess.run(["git", "clone", "--quiet", "--no-tags", str(HERE), str(clone.root)], check=True)
    for key, value in (("user.name", "Somebody"), ("user.email", "somebody@example.org")):
        clone.must("git", "config", key, value)
    clone.must("git", "remote", "set-url", "origin", f"{URL}.git")
    clone.must(sys.executable, "scripts/repository_url.py", "--set", URL)
    clone.commit("Set where it is published")
    for name in (LOWER, UPPER):
        clone.release(name)
    yield clone
    shutil.rmtree(clone.root, ignore_errors=True)  # its environments have torch in them


@pytest.fixture
def clone(released):
    """The clone as it was after the releases, with a change in each package that breaks nothing."""
    for name in (LOWER, UPPER):
        source = released.root / f"packages/{name}/src/{name.replace('-', '_')}/__init__.py"
        source.write_text(f"{source.read_text()}\n# what is next\n")
    yield released
    released.must("git", "checkout", "--quiet", "--", ".")
    released.must("git", "clean", "--quiet", "-d", "--force", "packages")


def test_the_changelog_folder_survives_a_release_and_takes_the_next_fragment(released):
    for name in (LOWER, UPPER):
        folder = f"packages/{name}/changelog.d"
        assert released.must("git", "ls-files", folder).split() == [f"{folder}/.gitkeep"]
        assert f"{name}/v0.1.0" in released.must("git", "tag")
        assert "## [0.1.0]" in (released.root / f"packages/{name}/CHANGELOG.md").read_text()
    before = released.must("git", "rev-parse", "HEAD").strip()
    folder = released.root / f"packages/{LOWER}/changelog.d"
    (folder / "+next.added.md").write_text("Do more.\n")
    released.commit("Do more")
    released.release(LOWER, "patch")
    changelog = (released.root / f"packages/{LOWER}/CHANGELOG.md").read_text()
    assert changelog.index("## [0.1.1]") < changelog.index("- Do more.") < changelog.index("## [0.1.0]")
    assert [path.name for path in folder.iterdir()] == [".gitkeep"]
    released.must("git", "tag", "--delete", f"{LOWER}/v0.1.1")
    released.must("git", "reset", "--quiet", "--hard", before)


def test_floor_and_regression_run_the_released_tests_and_pass_without_a_break(clone):
    for session in (f"floor-{UPPER}", f"regression-{LOWER}"):
        done = clone.nox("-s", session, *ONE_TEST)
        assert done.returncode == 0, done.stdout
        assert re.search(r"\b1 passed", done.stdout), done.stdout
        assert "nothing to" not in done.stdout


def test_regression_and_api_name_a_removed_function_that_the_released_package_above_uses(clone):
    source = f"packages/{LOWER}/src/rl_parallel_plans/__init__.py"
    clone.change(source, f", {FUNCTION}\n", "\n")
    clone.change(source, f"clip_grad_by_total_norm_ {FUNCTION}", "clip_grad_by_total_norm_")
    clone.change(source, f'    "{FUNCTION}",\n', "")
    above = f"packages/{UPPER}/src/rl_backends/optimizers/optimizers.py"  # the tree itself is mended, and would pass
    clone.change(above, f", {FUNCTION}, to_local", ", to_local")
    clone.change(above, RESHARD, f"{RESHARD}from rl_parallel_plans.sharding.grad_norm import {FUNCTION}\n")
    done = clone.nox("-s", f"regression-{LOWER}", *ONE_TEST)
    assert done.returncode == 1, done.stdout
    assert f"cannot import name '{FUNCTION}' from 'rl_parallel_plans'" in done.stdout
    done = clone.nox("-s", "api")
    assert done.returncode == 1, done.stdout
    assert FUNCTION in done.stdout
    assert f"announce these breaks in a changed or removed fragment: {LOWER}" in done.stdout


def test_regression_names_a_figure_that_changed(clone):
    source = f"packages/{LOWER}/src/rl_parallel_plans/sharding/grad_norm.py"
    clone.change(source, "if not norm_type > 0:", "norm_type = norm_type + 1\n    if not norm_type > 0:")
    done = clone.nox("-s", f"regression-{LOWER}", *ONE_TEST)
    assert done.returncode == 1, done.stdout
    assert re.search(r"FAILED .*first_program", done.stdout), done.stdout
    assert "assert [0, 0, 0, 1] == [1, 1, 1, 1]" in done.stdout  # the three lines with a norm, not "saved and loaded"


def test_floor_names_a_function_that_the_oldest_admitted_release_lacks(clone):
    source = f"packages/{LOWER}/src/rl_parallel_plans/dtensor.py"
    file = clone.root / source
    file.write_text(f"{file.read_text()}\n\ndef newer_than_the_floor():\n    pass\n")
    above = f"packages/{UPPER}/src/rl_backends/optimizers/optimizers.py"
    clone.change(above, RESHARD, f"{RESHARD}from rl_parallel_plans.dtensor import newer_than_the_floor\n")
    done = clone.nox("-s", f"floor-{UPPER}", *ONE_TEST)
    assert done.returncode == 1, done.stdout
    assert "cannot import name 'newer_than_the_floor' from 'rl_parallel_plans.dtensor'" in done.stdout
