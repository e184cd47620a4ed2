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

from environments import (
    SUPPORTED,
    check_python,
    configured_too,
    damage_of,
    find_uv,
    pins,
    torch_requirement,
    uv_variables,
    version_of,
)
from repository import Repository, cell_id


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


def test_each_cell_is_listed_with_its_python_and_only_a_package_s_last_one_and_its_newest_vllm_are_quick():
    command = [sys.executable, "-m", "nox", "--list", "--json", "-k", "tests"]
    here = Path(__file__).resolve().parents[2]
    listed = json.loads(subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout)
    sessions = {each["session"]: each for each in listed if each["session"].startswith("tests-")}
    assert {each["python"] for each in sessions.values()} == set(SUPPORTED)
    for package in Repository.read(here).packages.values():
        names = [f"tests-{package.name}({cell_id(cell)})" for cell in package.cells]
        assert [sessions[name]["python"] for name in names] == [cell["python"] for cell in package.cells]
        quick = [name for name in names if "quick" in sessions[name]["tags"]]
        newest_vllm = [name for name in names if "vllm" in name][-1:]
        assert quick == [*newest_vllm, names[-1]]


CONFIGURED = """\
:env:.find-links='/wheels /more'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple\\nfile:///b/simple'
global.find-links='/overridden'
install.no-binary='torch'
"""


def test_what_pip_is_configured_with_is_handed_to_uv_and_the_rest_is_named():
    variables, ignored = uv_variables(CONFIGURED)
    assert variables == {
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/etc/constraints.txt",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # the highest version of all indexes, as pip has it
    }
    assert ignored == ["no-binary"]
    assert uv_variables("") == ({}, [])


def test_an_option_of_uv_leaves_what_is_configured_in_force():
    variables = {"UV_FIND_LINKS": "/wheels,/more", "UV_CONSTRAINT": "/etc/constraints.txt"}
    assert configured_too(["torch", "--find-links", "stubs"], variables) == [
        *("--find-links", "/wheels", "--find-links", "/more")
    ]
    assert configured_too(["--constraint", "mine.txt"], variables) == ["--constraint", "/etc/constraints.txt"]
    assert configured_too(["--constraint", "mine.txt", "--find-links", "x"], {}) == []
    assert configured_too(["torch"], variables) == []


def test_an_installer_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv("RL_STACK_INSTALLER", "conda")
    with pytest.raises(SystemExit, match=r"^RL_STACK_INSTALLER=conda is not known: set it to uv or pip, or unset it"):
        find_uv()
    monkeypatch.setenv("RL_STACK_INSTALLER", "pip")
    assert find_uv() is None


NOXFILE = """
import sys
from pathlib import Path
import nox
sys.path.insert(0, {scripts!r})
from environments import find_uv, install
from repository import Repository, cell_id
REPO = Repository.read(Path.cwd())
nox.options.default_venv_backend = "uv" if find_uv() else "virtualenv"
nox.options.reuse_venv = "yes"

@nox.session
def toy(session):
    install(session, REPO, ["ground"])
    session.run("python", "-c", "import ground; print('ground', 'stands')")
"""


@pytest.mark.parametrize("installer", ["uv"])
def test_an_environment_heals_and_install_only_installs(root, monkeypatch, installer):
    monkeypatch.setenv("RL_STACK_INSTALLER", installer)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pyproject = root / "packages/ground/pyproject.toml"
    text = pyproject.read_text().replace("['torch>=2.9']", "[]").replace("3.11", RUNNING)
    # No build requirement, so that no index is asked: a backend in the tree that writes an editable wheel.
    pyproject.write_text(f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n\n{text}')
    (pyproject.parent / "backend.py").write_text(BACKEND)
    for other in ("wall", "roof"):
        shutil.rmtree(root / "packages" / other)
    (root / "noxfile.py").write_text(NOXFILE.format(scripts=str(Path(__file__).resolve().parents[1])))

    def run(*options):
        command = [sys.executable, "-m", "nox", "-s", "toy", *options]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
        done = subprocess.run(command, cwd=root, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "ground stands" not in run("--install-only")
    environment = root / ".nox/toy"
    assert damage_of(environment) is None
    assert "nothing to install" in (printed := run())
    assert "ground stands" in printed
    (record,) = environment.glob("lib/python*/site-packages/ground-*.dist-info/RECORD")
    (record.parent / "METADATA").unlink()
    assert "METADATA of ground-0.1.0 is gone" in (printed := run())
    assert "ground stands" in printed
    (environment / "made-from.txt").unlink()  # as an interrupted installation leaves it
    assert "ground stands" in run()


BACKEND = """
import zipfile
from pathlib import Path

def build_editable(directory, config_settings=None, metadata_directory=None):
    info, name = "ground-0.1.0.dist-info", "ground-0.1.0-py3-none-any.whl"
    files = {
        "ground.pth": str(Path("src").resolve()) + "\\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\\nName: ground\\nVersion: 0.1.0\\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\\nGenerator: toy\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(Path(directory) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""
