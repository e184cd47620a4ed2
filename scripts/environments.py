"""How nox's environments get their contents.

An environment holds what was asked for and nothing left over: `install` writes down what it was made from, does nothing
while that stays the same, and starts from an empty environment when it changes. So a dependency that nobody declares
any more is gone at the next run, and a second run costs no time.

What is large of what the matrix pins, torch above all, is unpacked once for all cells that pin the same, beside the
sessions' environments, and hard-linked into each: a true installation in half a second and no disk, where pip takes 10
to 30 s and 1.1 GB, and for vLLM two minutes and 2.5 GB. The rest comes from pip.
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

STAMP = "made-from.txt"
LARGE = ("torch", "transformers", "vllm")
TORCH_CHOICE = "RL_STACK_TORCH"

# One thread a process: tests start several processes, and spinning threads that share two cores cost a factor of ten.
# Bytecode is written even where the user's shell forbids it: without it, importing torch takes three times as long.
SURROUNDINGS: dict[str, str | None] = {
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
    """Make an environment hold `names` and their siblings as `repository` has them, and all that they declare.

    Args:
        session: Who asks; its interpreter is the environment's.
        repository: Where the packages are.
        names: The packages; those below them come along, in the same resolution.
        cell: Pins of a matrix, as `{"torch": "2.13"}`; without it, those of the quick cells.
        groups: Dependency groups of `names` to install as well, where they have them.
        requirements: What else pip is to install.
        wheels: Install what would be released, instead of the working tree in editable form.
        home: An environment of the user's, instead of the session's; it shares no file with others.
    """
    session.env.update(SURROUNDINGS)
    known = {cell["python"] for name in repository.closure(*names) for cell in repository.packages[name].cells}
    if names and session.python not in known:
        session.error(
            f"no cell of {' or '.join(names)} has Python {session.python}: choose {' or '.join(sorted(known))}"
        )
    roots = [repository.packages[name].root for name in repository.closure(*names)]
    grouped = [line for name in names for group in groups for line in repository.packages[name].group(group)]
    pinned = pins(repository, names, repository.newest(*names) if cell is None else cell)
    asked = [*pinned, *grouped, *requirements]
    sources = [path for root in roots for path in _sources(root, everything=wheels)]
    made_from = "\n".join([str(session.python), *asked, *(f"{path} {_digest(path)}" for path in sources), ""])
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


def pins(repository: Repository, names: Sequence[str], cell: Mapping[str, str]) -> list[str]:
    """The matrix cell as pip requirements; torch also where the cell leaves it open but the packages need it."""
    pinned = [f"{name}=={minor}.*" for name, minor in cell.items() if name not in {"python", "torch"}]
    if "torch" in cell or "torch" in repository.third_parties(*names):
        pinned.append(torch_requirement(repository.root / "constraints", minor=cell.get("torch")))
    return pinned


def torch_requirement(constraints: Path, *, minor: str | None = None) -> str:
    """Which torch fits this machine, by `constraints/cpu.txt` or `constraints/default.txt`.

    `RL_STACK_TORCH=cpu|default` overrules what the machine looks like. A `minor` from a matrix replaces that of the
    file, whose exclusions stay.
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
    """What the machine looks like, `cpu` or `default`, or what `RL_STACK_TORCH` says."""
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    return os.environ.get(TORCH_CHOICE) or ("default" if has_gpu else "cpu")


def build(session: nox.Session, roots: Iterable[Path], *, shelf: Path, editable: bool) -> None:
    """Fill `shelf` with the wheels of the packages in `roots`; no environment of a session sees the build tools."""
    shutil.rmtree(shelf, ignore_errors=True)
    builder = beside(session, "hatchling>=1.26", "editables")
    script = str(Path(__file__).with_name("build_wheels.py"))
    _run(session, builder, script, *(["--editable"] if editable else []), str(shelf), *map(str, roots))


def beside(session: nox.Session, *requirements: str, vllm: str | None = None) -> Path:
    """An environment that sessions share and never change, made at the first call.

    Where `requirements` pin a minor of `vllm`, and the machine has no GPU, by the recipe of vllm_cpu.py.
    """
    from filelock import FileLock  # which comes with virtualenv

    digest = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:12]
    home = (session.cache_dir / f"{session.python}-{digest}").resolve()
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
    """Hard-link what is installed in the environment `shared` into `home`."""
    target = _site_packages(session, home)
    for entry in _site_packages(session, shared).iterdir():
        if not (target / entry.name).exists():  # as pip does, which virtualenv put into both
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
    """Make or remake the virtual environment in `home`: an interpreter and pip."""
    command = ["virtualenv", "--quiet", "--clear", "--no-setuptools", "--python", str(session.python), str(home)]
    _quietly(session, sys.executable, "-m", *command)


def _pip(session: nox.Session, home: Path, *requirements: str, compile_all: bool = False) -> None:
    # Python compiles a module when it is first imported; pip would compile all, of which a session imports a tenth.
    _run(session, home, "-m", "pip", "install", "--quiet", *([] if compile_all else ["--no-compile"]), *requirements)


def _run(session: nox.Session, home: Path, *arguments: str) -> str:
    """Run the interpreter of `home`."""
    return _quietly(session, str(home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")), *arguments)


def _quietly(session: nox.Session, *command: str) -> str:
    """Run and return the output, which nox shows when the command fails."""
    return str(session.run(*command, silent=True, log=False, external=True, env=SURROUNDINGS))


def _sources(root: Path, *, everything: bool) -> list[Path]:
    """The files that an installation of the package in `root` is made from."""
    files = [root / "pyproject.toml"]
    if everything:
        files += [root / "README.md", *sorted(path for path in (root / "src").rglob("*") if path.suffix != ".pyc")]
    return [path for path in files if path.is_file()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
