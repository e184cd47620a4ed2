"""Install packages into nox's environments, by uv where it is installed and by pip where it is not.

An environment contains exactly what was requested: `install` records what it was made from, does nothing while that
stays the same and every installed file is still there, and starts from an empty environment otherwise. So a dependency
that is no longer declared is gone at the next run, an interrupted or damaged environment is made again, and a second
run takes no time.

uv keeps one copy of each release in its cache and hard-links it into every environment, so that torch costs neither
time nor disk space after the first. It reads no configuration of pip: `indexes_of_pip` hands over the indexes, the
folders with wheels and the constraints that are configured for pip, such as those of a local build of torch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import shutil
import subprocess
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
TORCH_CHOICE = "RL_STACK_TORCH"
INSTALLER_CHOICE = "RL_STACK_INSTALLER"

# One thread per process: tests start several processes, and spinning threads on two cores cost a factor of ten.
# Bytecode is written even if the user's shell disables it: without it, importing torch takes three times as long.
ENVIRONMENT: dict[str, str | None] = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONDONTWRITEBYTECODE": None,
    "PYTHONPATH": None,
}

# Options of pip, and the variables of uv that mean the same. uv takes lists separated by spaces.
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
# Options of pip that change what is installed, and that uv has in another form: they are named, not guessed.
NOT_HANDED_OVER = ("only-binary", "no-binary", "pre", "require-hashes", "platform", "client-cert", "build-constraint")


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
        cell: Pins of a matrix, as `{"torch": "2.13"}`; without it, those of the quick cells. With
            `resolution = "lowest-direct"` every third party that the packages declare is taken at its floor.
        groups: Dependency groups of `names` to install as well, if they have them.
        requirements: Further requirements.
        wheels: Install what would be released, from wheels that are built from source distributions, instead of the
            working tree in editable form.
        home: The user's own environment instead of the session's.
    """
    session.env.update(ENVIRONMENT)
    check_python(session, [cell for name in repository.closure(*names) for cell in repository.packages[name].cells])
    roots = [repository.packages[name].root for name in repository.closure(*names)]
    grouped = [line for name in names for group in groups for line in repository.packages[name].group(group)]
    asked = [*pins(repository, names, repository.newest(*names) if cell is None else cell), *grouped, *requirements]
    lowest = (cell or {}).get("resolution") == "lowest-direct"
    sources = [path for root in roots for path in _sources(root, everything=wheels)]
    version = version_of(session)
    made_from = "\n".join([version, str(lowest), *asked, *(f"{path} {_digest(path)}" for path in sources), ""])
    environment = home or session.env_dir.resolve()
    stamp = environment / STAMP
    if stamp.is_file() and stamp.read_text() == made_from:
        if not (damage := damage_of(environment)):
            session.log(f"{environment.name} is made from the same as before: nothing to install")
            return
        session.warn(f"{environment.name} is made again, because {damage}")
    stamp.unlink(missing_ok=True)  # from here on it is unfinished
    installer = Installer(session, environment)
    installer.make_empty()
    shelf = environment / "wheels"
    if wheels:
        installer.build(roots, shelf=shelf)
        packages = [str(path) for path in sorted(shelf.glob("*.whl"))]
    else:
        packages = [word for root in roots for word in ("--editable", str(root))]
    options: list[str] = []
    if (minor := (cell or {}).get("vllm")) and torch_choice() == "cpu":
        options += vllm_cpu.pip_options(minor, environment / "stubs")
    if lowest:
        options += ["--constraint", str(installer.floors_of(roots, pinned=asked, shelf=environment / "floors"))]
    installer.install(*options, *packages, *asked)
    stamp.write_text(made_from)


class Installer:
    """uv, or pip where there is no uv, for the environment in `home`."""

    def __init__(self, session: nox.Session, home: Path) -> None:
        self.session = session
        self.home = home
        self.uv = find_uv()
        self.python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.variables: dict[str, str | None] = dict(ENVIRONMENT)
        if self.uv:
            handed, ignored = indexes_of_pip()
            self.variables |= {name: value for name, value in handed.items() if name not in os.environ}
            if ignored:
                session.warn(f"pip is configured with {', '.join(ignored)}, which uv does not get: unset it, or set "
                             f"{INSTALLER_CHOICE}=pip")  # fmt: skip

    def make_empty(self) -> None:
        """Create or recreate the virtual environment: an interpreter, and pip where it installs."""
        python = interpreter(self.session)
        if self.uv:
            self._run(self.uv, "venv", "--quiet", "--clear", "--no-project", "--python", python, str(self.home))
        else:
            command = ["virtualenv", "--quiet", "--clear", "--no-setuptools", "--python", python, str(self.home)]
            self._run(sys.executable, "-m", *command)

    def install(self, *words: str) -> None:
        """Install requirements, wheels and editable folders, with options that both installers know."""
        if not words:
            return
        if self.uv:
            also = configured_too(words, {**os.environ, **self.variables})
            self._run(self.uv, "pip", "install", "--quiet", "--python", str(self.python), *also, *words)
        else:  # Python compiles a module at its first import; a session imports a tenth of what pip would compile
            self._run(str(self.python), "-m", "pip", "install", "--quiet", "--no-compile", *words)

    def build(self, roots: Iterable[Path], *, shelf: Path) -> None:
        """Fill `shelf` with the wheels of the packages in `roots`, built from their source distributions."""
        shutil.rmtree(shelf, ignore_errors=True)
        for root in roots:
            if self.uv:
                self._run(self.uv, "build", "--quiet", "--out-dir", str(shelf), str(root))
            else:
                command = [str(self.python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(shelf)]
                self._run(*command, str(root))

    def floors_of(self, roots: Sequence[Path], *, pinned: Sequence[str], shelf: Path) -> Path:
        """Return a file of constraints: every third party that the packages in `roots` declare, at its floor."""
        if not self.uv:
            self.session.error("floors are resolved by uv, which is not installed: pip install uv")
        self.build(roots, shelf=shelf)
        (bounds := shelf / "pinned.txt").write_text("\n".join([*pinned, ""]))
        found = shelf / "lowest-direct.txt"
        siblings = [word for root in roots for word in ("--no-emit-package", root.name)]
        options = ["--resolution", "lowest-direct", "--python", str(self.python), "--find-links", str(shelf)]
        inputs = [str(root / "pyproject.toml") for root in roots]
        command = [self.uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options, *siblings]
        self._run(*command, "--constraint", str(bounds), "--output-file", str(found), *inputs)
        direct = {Requirement(line).name for root in roots for line in _declared(root)}
        lines = found.read_text().splitlines() if found.is_file() else []  # none under `nox --install-only --list`
        kept = [line for line in lines if line and not line.startswith("#") and Requirement(line).name in direct]
        found.write_text("\n".join([*kept, ""]))
        return found

    def _run(self, *command: str) -> None:
        """Run a command, also under `--install-only`; nox shows its output if it fails."""
        self.session.run_install(*command, silent=True, log=False, external=True, env=self.variables)


def find_uv() -> str | None:
    """Return the path of uv, or None; `RL_STACK_INSTALLER=uv|pip` insists on one of them."""
    choice = os.environ.get(INSTALLER_CHOICE, "")
    if choice not in {"", "uv", "pip"}:
        sys.exit(f"{INSTALLER_CHOICE}={choice} is not known: set it to uv or pip, or unset it.")
    if choice == "pip":
        return None
    beside = Path(sys.executable).with_name("uv")  # installed with nox, whether or not that folder is on the PATH
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None and choice == "uv":
        sys.exit(f"{INSTALLER_CHOICE}=uv, and uv is not installed: pip install uv, or unset {INSTALLER_CHOICE}.")
    return found


@functools.cache
def indexes_of_pip() -> tuple[dict[str, str], list[str]]:
    """Return what pip is configured with as variables of uv, and the options that have no counterpart.

    Without any, uv is left as it is. With further indexes uv is told to choose among all of them by version, as pip
    does; by itself it would stop at the first index that has a package.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return uv_variables(listed.stdout if listed.returncode == 0 else "")


def uv_variables(configuration: str) -> tuple[dict[str, str], list[str]]:
    """Translate what `pip config list` prints; later lines override earlier ones, and the environment all files."""
    options: dict[str, str] = {}
    lines = [line.partition("=") for line in configuration.splitlines() if "=" in line]
    sections = (("global.",), ("install.",), (":env:.",))  # in the order in which pip lets one override another
    for section in sections:
        for key, _, value in lines:
            if key.startswith(section):
                options[key.removeprefix(section[0])] = " ".join(str(ast.literal_eval(value)).split())
    found = {variable: options[option] for option, variable in PIP_TO_UV.items() if options.get(option)}
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")  # the one list that uv separates by commas
    if {"UV_INDEX", "UV_FIND_LINKS"} & found.keys():
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return found, sorted(option for option in NOT_HANDED_OVER if options.get(option))


def configured_too(words: Sequence[str], variables: Mapping[str, str | None]) -> list[str]:
    """Return what uv's variables say of the options in `words`: uv's options replace them, where pip's add to them."""
    return [
        word
        for option, variable in (("--find-links", "UV_FIND_LINKS"), ("--constraint", "UV_CONSTRAINT"))
        if option in words
        for value in re.split(r"[ ,]+", variables.get(variable) or "")
        if value
        for word in (option, value)
    ]


def damage_of(environment: Path) -> str | None:
    """Return what is missing in an environment, or None: its interpreter, or a file that an installation recorded."""
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists() or subprocess.run([str(python), "-c", ""], check=False, capture_output=True).returncode:
        return f"{python} does not run"
    for record in environment.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        folder = record.parent.parent
        for line in record.read_text(encoding="utf-8").splitlines():
            name = line.rsplit(",", 2)[0].strip('"')
            if "__pycache__" not in name and not name.endswith(".pyc") and not (folder / name).exists():
                return f"{name} of {record.parent.name.removesuffix('.dist-info')} is gone"
    return None


def interpreter(session: nox.Session) -> str:
    """Return the interpreter for a session: its version for the installers to find, or nox's own."""
    return str(session.python or sys.executable)


def use_every_pyenv() -> None:
    """Let pyenv's shims run every supported Python that it has, and not only the one it is set to."""
    if "PYENV_VERSION" in os.environ or shutil.which("pyenv") is None:
        return
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    chosen = run(["pyenv", "version-name"]).stdout.strip().split(":")
    others = [line.strip() for line in run(["pyenv", "versions", "--bare"]).stdout.splitlines()]
    wanted = [name for name in others if name.rpartition(".")[0] in SUPPORTED and name not in chosen]
    os.environ["PYENV_VERSION"] = ":".join([*chosen, *wanted])


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
    unpinned = {"python", "torch", "resolution"}
    pinned = [f"{name}=={minor}.*" for name, minor in cell.items() if name not in unpinned]
    if "torch" in cell or ("torch" in repository.third_parties(*names) and "resolution" not in cell):
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


def _declared(root: Path) -> list[str]:
    import tomllib

    return list(tomllib.loads((root / "pyproject.toml").read_text())["project"].get("dependencies", []))


def _sources(root: Path, *, everything: bool) -> list[Path]:
    """Return the files that an installation of the package in `root` is made from."""
    files = [root / "pyproject.toml"]
    if everything:
        files += [root / "README.md", *sorted(path for path in (root / "src").rglob("*") if path.suffix != ".pyc")]
    return [path for path in files if path.is_file()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
