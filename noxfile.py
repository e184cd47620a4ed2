"""Every check of every package. The packages declare what to check, in `packages/*/pyproject.toml`.

nox                          what a change must pass: each package in its newest cell and as a wheel, and the repository
nox -s tests-rl-refit        one package, in every cell of its matrix
nox -t rl-refit              everything that concerns one package
nox -s dev                   `.venv` with every package editable, in which `pytest packages/rl-refit` needs no nox
nox -s quickstart            from a fresh clone to a learning curve

`dev` and `quickstart` run on the Python that nox runs on, 3.11 to 3.13. The others need the matrix's Pythons,
above all 3.11; uv and pyenv are asked for those that are not on the PATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"
if sys.version_info < (3, 11):  # noqa: UP036  (nox itself runs on older ones)
    sys.exit(f"RL Stack needs Python 3.11 or newer, and this nox runs on {sys.version.split()[0]}.")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "scripts"))

from environments import find_uv, install, use_every_pyenv  # noqa: E402  (found by the line above)
from repository import Package, Repository, admitted, cell_id, floor, group  # noqa: E402

REPO = Repository.read(HERE)
TOOLS = nox.project.load_toml(HERE / "pyproject.toml")
PYTHON = "3.11"  # of the checks: the oldest one supported; the cells of the matrix name their own
MEGATRON = REPO.packages["rl-backends"].optional_dependencies("megatron")
HEAVY = {"ray": "ray", "vllm": "vllm", "megatron-core": "megatron"}  # never loaded by importing one of our packages

OFFLINE = {"HF_HUB_OFFLINE": "1"}  # no test waits for the network

use_every_pyenv()
nox.options.default_venv_backend = "uv" if find_uv() else "virtualenv"  # environments.py fills them
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.tags = ["quick"]


# -- The whole repository, quick checks first ----------------------------------------------------


@nox.session(python=PYTHON, tags=["quick"])
def lint(session: nox.Session) -> None:
    """Check the style: ruff, words, changelog fragments. `-- --fix` repairs what ruff can."""
    install(session, REPO, [], requirements=group(TOOLS, "lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))
    session.run("python", "scripts/repository_rules.py")


@nox.session(python=PYTHON, tags=["quick"])
def layers(session: nox.Session) -> None:
    """Check every import against the contracts of `pyproject.toml`. Needs no torch."""
    install(session, REPO, [], requirements=group(TOOLS, "layers"))
    sources = ":".join(str(package.root / "src") for package in REPO.packages.values())
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session(python=PYTHON, tags=["quick"])
def scripts(session: nox.Session) -> None:
    """Test the scripts that these sessions and CI call."""
    install(session, REPO, [], requirements=[*group(TOOLS, "test"), *group(TOOLS, "release"), "nox", "uv", "pip"])
    session.run("pytest", "scripts/tests", *session.posargs)


@nox.session(python=PYTHON, tags=["quick"])
def typecheck(session: nox.Session) -> None:
    """Run mypy, strict, over every package and over the seams between them."""
    install(session, REPO, [*REPO.packages], groups=["test"], requirements=group(TOOLS, "types"))
    sources = [f"packages/{name}/src" for name in REPO.packages]
    seams = [os.path.relpath(path, HERE) for path in HERE.glob("tests-integration/test_seams.py")]
    session.run("mypy", *sources, *seams, "noxfile.py", "scripts", *session.posargs)


@nox.session(python=PYTHON, tags=["quick"])
def docs(session: nox.Session) -> None:
    """Check links, anchors and the tables of public names, and run the examples in docstrings."""
    install(session, REPO, [*REPO.packages], requirements=group(TOOLS, "test"))
    session.run("python", "scripts/check_docs.py")
    sources = [f"packages/{name}/src" for name in REPO.packages]
    options = ["--doctest-modules", "--doctest-ignore-import-errors", "-q"]
    session.run("pytest", *options, *sources, *session.posargs, success_codes=[0, 5])  # 5: no examples


@nox.session(python=PYTHON, tags=["quick"])
def site(session: nox.Session) -> None:
    """Build the documentation site from the READMEs, `docs/` and the docstrings, in `build/site/site`."""
    install(session, REPO, ["rl-algorithms"], requirements=group(TOOLS, "site"))
    session.run("python", "scripts/documentation_site.py", "build/site")
    session.run("mkdocs", "build", "--quiet", "--strict", "--config-file", "build/site/mkdocs.yml")


# -- Each package --------------------------------------------------------------------------------


def run_tests(
    session: nox.Session,
    package: Package,
    repository: Repository,
    *,
    cell: dict[str, str] | None = None,
    wheels: bool = False,
) -> None:
    """Run the tests of `package`, with its siblings from `repository`."""
    install(session, repository, [package.name], cell=cell, groups=["test"], wheels=wheels)
    only = "tests/vllm" if "vllm" in (cell or {}) else "."  # the other tests run in the other cells
    tests = os.path.relpath(package.root / only, HERE)
    session.run("pytest", tests, *session.posargs, env=OFFLINE)


def try_wheel(session: nox.Session, package: Package) -> None:
    """Install `package` from built wheels, with its declared dependencies and nothing else, and use it."""
    install(session, REPO, [package.name], wheels=True)
    declared = {*REPO.closure(package.name), *REPO.third_parties(package.name)}
    absent = [name for name in [*REPO.packages, *HEAVY] if name not in declared]
    lazy = [*HEAVY.values(), *({"pydantic"} - declared)]
    with session.chdir(session.env_dir):  # far from the working tree
        readme = str(package.root / "README.md")
        arguments = [package.import_name, readme, "--absent", *absent, "--lazy", *lazy]
        session.run("python", str(HERE / "scripts/try_wheel.py"), *arguments)


def test_floor(session: nox.Session, package: Package) -> None:
    """Test `package` with the oldest siblings that it admits, unpacked from their tags."""
    lowest = {name: floor(versions) for name, versions in REPO.siblings(package.name).items()}
    released = [(name, version) for name, version in lowest.items() if version in REPO.releases(name)]
    for name, version in lowest.items() - released:
        if version != REPO.packages[name].version:
            session.error(f"{package.name} admits {name} {version}, but there is no tag {name}/v{version}")
        session.log(f"{name} {version} is the unreleased version in this tree: tests-{package.name} covers it")
    if not released:
        session.log(f"{package.name} admits no released sibling: nothing to test")
        return
    older = REPO.with_released(*(REPO.checkout(name, version, shelf(session)) for name, version in released))
    run_tests(session, package, older, wheels=True)


def test_regression(session: nox.Session, package: Package) -> None:
    """Run the released tests of each package that depends on `package`, with `package` from this tree."""
    above = [name for name in REPO.packages if package.name in REPO.siblings(name) and REPO.releases(name)]
    if not above:
        session.log(f"no released package depends on {package.name}: nothing to break")
    for name in above:
        released = REPO.checkout(name, REPO.releases(name)[0], shelf(session))
        if package.version in admitted(released, REPO.packages).get(package.name, ()):
            run_tests(session, released, REPO.with_released(released), wheels=True)
        else:
            session.log(f"{name} {released.version} does not admit {package.name} {package.version}: nothing to break")


def shelf(session: nox.Session) -> Path:
    """Return where releases are unpacked: beside the session's environment, which is recreated when they change."""
    return session.env_dir.with_name(f"{session.env_dir.name}-released")


def define_sessions(package: Package) -> None:
    """Define `tests-`, `wheel-`, `floor-` and `regression-` for one package."""
    name, python = package.name, package.cells[-1]["python"]

    def tests(session: nox.Session, cell: dict[str, str], **_: str) -> None:  # --force-python passes `python` too
        run_tests(session, package, REPO, cell=cell)

    def wheel(session: nox.Session) -> None:
        try_wheel(session, package)

    def floors(session: nox.Session) -> None:
        test_floor(session, package)

    def regression(session: nox.Session) -> None:
        test_regression(session, package)

    tests.__doc__ = f"Test {name} with its siblings from this tree."
    wheel.__doc__ = f"Install {name} as a user would, and run its README."
    floors.__doc__ = f"Test {name} with the oldest siblings that it admits."
    regression.__doc__ = f"Run the tests of released packages with {name} from this tree."

    newest_vllm = [cell for cell in package.cells if "vllm" in cell][-1:]
    quick = [*newest_vllm, package.cells[-1]]
    cells = [nox.param(c["python"], c, id=cell_id(c), tags=["quick"] if c in quick else []) for c in package.cells]
    nox.session(name=f"tests-{name}", tags=[name])(nox.parametrize(["python", "cell"], cells)(tests))
    nox.session(name=f"wheel-{name}", tags=[name, "quick"], python=python)(wheel)
    nox.session(name=f"floor-{name}", tags=[name, "floor"], python=python, default=False)(floors)
    nox.session(name=f"regression-{name}", tags=[name, "regression"], python=python, default=False)(regression)


for _package in REPO.packages.values():
    define_sessions(_package)


# -- The whole repository, slow checks and commands ----------------------------------------------


@nox.session(python=PYTHON, tags=["quick"])
def integration(session: nox.Session) -> None:
    """Test the packages together, in real processes, and the code blocks of the documents."""
    install(session, REPO, [*REPO.packages], groups=["test"], requirements=[*MEGATRON, *group(TOOLS, "scripts"), "nox"])
    session.run("pytest", "tests-integration", *session.posargs, env=OFFLINE)


@nox.session(name="integration-vllm", python=PYTHON, tags=["quick"])
def integration_vllm(session: nox.Session) -> None:
    """Test the packages together with real vLLM, and entire runs on real Ray."""
    *_, cell = (cell for cell in REPO.packages["rl-generation"].cells if "vllm" in cell)
    install(session, REPO, [*REPO.packages], cell=cell, groups=["test"])
    session.run("pytest", "tests-integration/with_vllm", "tests-integration/with_ray", *session.posargs, env=OFFLINE)


@nox.session(python=PYTHON, tags=["quick"])
def trackers(session: nox.Session) -> None:
    """Test rl-observe with the real clients of Weights & Biases, MLflow and trackio, all offline."""
    observe = REPO.packages["rl-observe"]
    clients = [line for name in ("wandb", "mlflow", "trackio") for line in observe.optional_dependencies(name)]
    install(session, REPO, ["rl-observe"], groups=["test"], requirements=clients)
    session.run("pytest", "packages/rl-observe/tests/test_trackers.py", *session.posargs, env=OFFLINE)


@nox.session(python=PYTHON, default=False)
def clients(session: nox.Session) -> None:
    """Test both of rl-generation's servers with litellm, LangChain, the OpenAI Agents SDK and verifiers as they are."""
    *_, cell = (cell for cell in REPO.packages["rl-generation"].cells if "vllm" in cell)
    install(session, REPO, ["rl-generation"], cell=cell, groups=["test", "clients"])
    tests = [f"packages/rl-generation/tests/{name}.py" for name in ("test_server_agents", "vllm/test_server_clients")]
    session.run("pytest", *tests, *session.posargs, env=OFFLINE)


@nox.session(default=False)  # without a Python: on the one that nox runs on
def quickstart(session: nox.Session) -> None:
    """Train on this machine: `-- key=value` overrides the recipe, `-- recipes/other.yaml` uses another one."""
    install(session, REPO, ["rl-launcher"])
    named = [argument for argument in session.posargs if argument.endswith(".yaml")]
    recipe = named[0] if named else "recipes/quickstart.yaml"
    overrides = [argument for argument in session.posargs if argument not in named]
    if not any(override.startswith("run_dir=") for override in overrides):
        overrides.append(f"run_dir={unused_run_directory(Path(recipe).stem)}")
    session.run("rl-launcher", "run", recipe, *overrides)


def unused_run_directory(name: str) -> str:
    """Return `runs/<name>`, or if that exists `runs/<name>-2` and so on: a run is never overwritten."""
    taken = {path.name for path in (HERE / "runs").glob(f"{name}*")}
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return f"runs/{next(each for each in (name, *numbered) if each not in taken)}"


@nox.session(python=PYTHON, default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks of the packages named after `--`, or all; the last line has every figure as JSON."""
    names = session.posargs or [*REPO.packages]
    install(session, REPO, names, groups=["test", "bench"])
    figures = {}
    for path in (path for name in names for path in sorted((REPO.packages[name].root / "benchmarks").glob("[!_]*.py"))):
        printed = session.run("python", str(path), silent=True)
        if printed is None:  # --install-only
            continue
        printed = str(printed)
        session.log(f"{path.relative_to(HERE)}\n{printed}")
        figures[f"{path.parent.parent.name}/{path.stem}"] = json.loads(printed.strip().splitlines()[-1])
    print(json.dumps(figures))


@nox.session(python=PYTHON, default=False)
def api(session: nox.Session) -> None:
    """Compare every package's public names with its last release. A break needs a `changed` or `removed` fragment."""
    install(session, REPO, [], requirements=group(TOOLS, "api"))
    silent_breaks = []
    for name, package in REPO.packages.items():
        if not (releases := REPO.releases(name)):
            session.log(f"{name} has no release yet: nothing to compare")
            continue
        against = REPO.commit_of(name, releases[0])
        command = ["griffe", "check", package.import_name, "-s", f"packages/{name}/src", "-a", against]
        if breaks := str(session.run(*command, silent=True, success_codes=[0, 1]) or "").strip():
            session.warn(f"{name} breaks {releases[0]}:\n{breaks}")
            silent_breaks += [] if package.fragments("changed", "removed") else [name]
    if silent_breaks:
        session.error(f"announce these breaks in a changed or removed fragment: {', '.join(silent_breaks)}")


@nox.session(python=PYTHON, default=False)
def release(session: nox.Session) -> None:
    """Release one package: `nox -s release -- rl-refit minor`. Checks, commits and tags; pushes nothing.

    Its tests, its wheel, its floors, the released packages above it and the public names are checked first.
    """
    install(session, REPO, [], requirements=group(TOOLS, "release"))
    session.run("python", "scripts/release.py", *session.posargs, "--dry-run")
    listed = session.run(sys.executable, "-m", "nox", "--list", "--json", "-t", "quick", external=True, silent=True)
    if listed is None:  # --install-only
        return
    name = session.posargs[0]
    tests = [each["session"] for each in json.loads(str(listed)) if name in each["tags"]]
    checks = [*tests, f"floor-{name}", f"regression-{name}", "api"]
    for check in checks:  # one by one, so that the first failure is the last thing on the screen
        session.run(sys.executable, "-m", "nox", "-s", check, external=True)
    session.run("python", "scripts/release.py", *session.posargs)


@nox.session(default=False)  # without a Python: on the one that nox runs on
def build(session: nox.Session) -> None:
    """Build what is uploaded of one package, in `dist/`: `nox -s build -- rl-refit [0.1.0]`. Uploads nothing."""
    if not session.posargs or session.posargs[0] not in REPO.packages:
        session.error(f"name one package after --: {', '.join(REPO.packages)}")
    package = REPO.packages[session.posargs[0]]
    if session.posargs[1:] not in ([], [str(package.version)]):
        session.error(f"{package.name} is {package.version} in this tree, not {session.posargs[1]}: check out its tag")
    install(session, REPO, [], requirements=[*group(TOOLS, "publish"), *group(TOOLS, "scripts")])
    session.run("python", "scripts/repository_url.py")  # exit code 2: what is built would name another repository
    for old in (HERE / "dist").glob(f"{package.import_name}-*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", "dist", str(package.root))
    built = sorted(str(path) for path in (HERE / "dist").glob(f"{package.import_name}-{package.version}*"))
    session.run("twine", "check", "--strict", *built)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Run the tests and benchmarks that need a GPU, in nine minutes, with what `python` has; on a CPU a dry run.

    Installs nothing and needs no network: the packages are read from this checkout. `-- --parts logp refit` chooses.
    """
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    probe = subprocess.run(["python", "-c", code], check=False, capture_output=True)
    if b"No module named" in probe.stderr:
        session.error("`python` has no torch: activate an environment that has it, such as .venv of `nox -s dev`")
    session.run("python", "scripts/gpu_day.py", *(["--dry-run"] if probe.returncode else []), *session.posargs)


@nox.session(python=PYTHON, default=False)
def audit(session: nox.Session) -> None:
    """Look the newest third parties of all packages up in the database of known vulnerabilities. Needs the network."""
    install(session, REPO, [*REPO.packages], requirements=group(TOOLS, "audit"), cell={})
    session.run("pip-audit", "--local", "--skip-editable", "--progress-spinner", "off", *session.posargs)


@nox.session(default=False)  # without a Python: on the one that nox runs on
def dev(session: nox.Session) -> None:
    """Create `.venv`, with every package editable and every tool, to edit in and to run pytest without nox."""
    tools = [line for name in ("lint", "layers", "types", "test") for line in group(TOOLS, name)]
    install(
        session,
        REPO,
        [*REPO.packages],
        groups=["test"],
        requirements=[*tools, *MEGATRON],
        home=HERE / ".venv",
    )
    session.log("ready: . .venv/bin/activate")
