"""Tests of ci_matrix.py: which sessions a change starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci_matrix import OWN_PYTHON, affected_packages, matrix
from repository import Repository

SESSIONS = [
    {"session": "lint", "python": "3.11", "tags": ["quick"]},
    {"session": "tests-ground(3.11-torch2.13)", "python": "3.11", "tags": ["ground", "quick"]},
    {"session": "tests-roof(3.12-torch2.13)", "python": "3.12", "tags": ["roof", "quick"]},
    {"session": "floor-roof", "python": "3.11", "tags": ["roof", "floor"]},
]


@pytest.mark.parametrize(
    ("changed", "affected"),
    [
        (["packages/roof/src/roof/tiles.py"], {"roof"}),
        (["packages/wall/README.md"], {"wall", "roof"}),
        (["packages/ground/tests/test_ground.py"], {"ground", "wall", "roof"}),
        (["packages/roof/README.md", "noxfile.py"], {"ground", "wall", "roof"}),
        (["packages/cellar/pyproject.toml"], {"ground", "wall", "roof"}),
        ([], set()),
    ],
)
def test_a_change_affects_its_package_and_those_above_it(root, changed, affected):
    assert affected_packages(Repository.read(root), changed) == affected


def test_an_unaffected_package_starts_nothing_and_the_sessions_of_the_repository_always_run():
    jobs = matrix(SESSIONS, affected={"roof"}, packages=["ground", "wall", "roof"])
    assert jobs == {
        "include": [
            {"session": "lint", "python": "3.11"},
            {"session": "tests-roof(3.12-torch2.13)", "python": "3.12"},
            {"session": "floor-roof", "python": "3.11"},
        ]
    }


def test_a_session_on_the_python_of_nox_runs_on_the_newest_one():
    own = [{"session": "quickstart", "python": None, "tags": []}]
    assert matrix(own, affected=set(), packages=[]) == {"include": [{"session": "quickstart", "python": OWN_PYTHON}]}


@pytest.mark.parametrize(
    ("arguments", "sessions"),
    [
        (["HEAD~1"], ["lint", "tests-roof(3.12-torch2.13)", "floor-roof"]),
        ([], [session["session"] for session in SESSIONS]),
        (["0" * 40], [session["session"] for session in SESSIONS]),  # what a first push gives as its base
    ],
)
def test_the_command_reads_sessions_and_asks_git_what_changed(root, git, arguments, sessions):
    (root / "packages/roof/README.md").write_text("# roof\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "Describe the roof")
    script = Path(__file__).resolve().parent.parent / "ci_matrix.py"
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        input=json.dumps(SESSIONS),
    )
    assert [job["session"] for job in json.loads(run.stdout)["include"]] == sessions
