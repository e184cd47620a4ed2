"""Tests of environments.py: which torch fits the machine, what a cell pins, and which Python a session takes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from environments import SUPPORTED, check_python, pins, torch_requirement, version_of
from repository import Repository


@pytest.fixture
def constraints(root):
    folder = root / "constraints"
    folder.mkdir()
    (folder / "cpu.txt").write_text("# a comment\ntorch==2.13.*\n")
    (folder / "default.txt").write_text("torch!=2.13.0+cpu\n")
    return folder


@pytest.mark.parametrize(
    ("choice", "minor", "requirement"),
    [
        ("cpu", None, "torch==2.13.*"),
        ("cpu", "2.9", "torch==2.9.*"),
        ("default", None, "torch!=2.13.0+cpu"),
        ("default", "2.13", "torch==2.13.*,!=2.13.0+cpu"),
    ],
)
def test_the_machine_chooses_the_build_and_the_cell_the_version(constraints, monkeypatch, choice, minor, requirement):
    monkeypatch.setenv("RL_STACK_TORCH", choice)
    assert torch_requirement(constraints, minor=minor) == requirement


def test_an_unknown_build_is_refused_in_one_line(constraints, monkeypatch):
    monkeypatch.setenv("RL_STACK_TORCH", "rocm")
    with pytest.raises(
        SystemExit, match=r"^RL_STACK_TORCH=rocm is not known: set it to cpu or default, or unset it\.$"
    ):
        torch_requirement(constraints)


@pytest.mark.usefixtures("constraints")
def test_a_cell_pins_minors_and_never_python(root, monkeypatch):
    monkeypatch.setenv("RL_STACK_TORCH", "cpu")
    cell = {"python": "3.11", "torch": "2.12", "transformers": "5.19"}
    assert pins(Repository.read(root), ["roof"], cell) == ["transformers==5.19.*", "torch==2.12.*"]
    assert pins(Repository.read(root), ["roof"], {}) == ["torch==2.13.*"]
    assert pins(Repository.read(root), [], {}) == []


CELLS = [{"python": "3.11", "torch": "2.13"}]
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def session(python):
    def error(message):
        raise SystemExit(message)

    return SimpleNamespace(python=python, error=error)


def test_a_session_without_a_python_runs_on_that_of_nox(monkeypatch):
    assert version_of(session(None)) == RUNNING
    assert version_of(session("3.12")) == "3.12"
    for version in SUPPORTED:
        monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=int(version.split(".")[1])))
        check_python(session(None), CELLS)  # whether or not a cell has it


@pytest.mark.parametrize(
    ("python", "minor", "reason"),
    [
        (None, 14, "this nox runs on Python 3.14: install nox for one of 3.11, 3.12, 3.13"),
        ("3.12", 11, "not tested on Python 3.12: choose 3.11"),
    ],
)
def test_a_python_that_is_not_supported_is_refused_with_those_that_are(monkeypatch, python, minor, reason):
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=minor))
    with pytest.raises(SystemExit, match=re.escape(reason)):
        check_python(session(python), CELLS)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_noxfile_loads_without_a_python_of_the_matrix_on_the_path(tmp_path):
    (tmp_path / "git").symlink_to(shutil.which("git"))
    command = [sys.executable, "-m", "nox", "--list", "--json", "-s", "dev", "quickstart", "lint"]
    here = Path(__file__).resolve().parents[2]
    listed = subprocess.run(
        command, cwd=here, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    pythons = {each["session"]: each["python"] for each in json.loads(listed.stdout)}
    assert pythons == {"dev": None, "quickstart": None, "lint": "3.11"}
