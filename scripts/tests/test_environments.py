"""Tests of environments.py: which torch fits the machine, and what a cell pins."""

import pytest

from environments import pins, torch_requirement
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
