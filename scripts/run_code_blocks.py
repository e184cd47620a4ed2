"""Run the code blocks of documents as they are written, page by page, each in an empty folder.

    python scripts/run_code_blocks.py                       every page, without what is marked nightly
    python scripts/run_code_blocks.py README.md docs/clusters.md
    python scripts/run_code_blocks.py --nightly docs        only what is marked nightly

python     is executed, a program by itself; the names that its mark's `given` file leaves are there. A block that
           begins with `# name.py` is written to that file as well.
sh         every command of ours is carried out in this process by the entry point that `pyproject.toml` names, and
           must end with 0, or with what its mark says. `nox` lists the sessions that it is given, `pip install` may
           name only extras that exist, `pytest` only what is there.
yaml       a recipe: written to the file that its first line names, validated and explained. One that says no `defaults`
           is a part, and is laid over the quickstart.
toml       is read.
not run    of python all that it imports from our packages must exist; of sh each command of ours must know each
           option, and the keys that `rl-launcher run` overrides in a recipe must be valid; of yaml all keys.

What prints something that the text right below it shows must print exactly that. The folder `files` beside the given
programs is copied into each page's folder: the model, rows and rewards that the pages call yours. See
`scripts/code_blocks.py` for the marks. Exit code 1 if a block does not do what it says.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from code_blocks import GIVEN, blocks_of, documents
from repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from code_blocks import Block

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = Repository.read(ROOT)
ENTRY_POINTS = {
    name: target
    for package in REPOSITORY.packages.values()
    for name, target in package.pyproject["project"].get("scripts", {}).items()
}
ALLOWED = {"cd", "export", ".", "source"}
"""What only prepares the reader's shell."""


def main() -> None:
    """Run the blocks of the pages that are named, or of all; exit with 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="pages, or folders of them")
    parser.add_argument("--nightly", action="store_true", help="only the blocks that are marked nightly")
    arguments = parser.parse_args()
    asked = [path.resolve() for path in arguments.pages]
    pages = [page for page in documents(REPOSITORY) if not asked or {page, *page.parents} & {*asked}]
    if len(pages) > 1:  # a process each: one page's process group or threads are no other's
        chosen = ["--nightly"] * arguments.nightly
        codes = [subprocess.run([sys.executable, __file__, page, *chosen], check=False).returncode for page in pages]
        sys.exit(int(any(codes)))
    sys.path[:0] = [str(ROOT / "tests-integration"), str(ROOT / "docs/tools")]
    failures = [failure for page in pages for failure in run_page(page, nightly=arguments.nightly)]
    for failure in failures:
        print(failure.replace(f"{ROOT}/", ""), file=sys.stderr)
    if failures:
        sys.exit(f"{len(failures)} blocks do not do what they say")


def run_page(page: Path, *, nightly: bool) -> Iterator[str]:
    """Run the blocks of one page in a new folder, and yield what is wrong with each that fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        (Path(folder) / "runs").mkdir()
        given_files(Path(folder), page)
        for block in blocks_of(page):
            if not block.is_code or block.mark.run_by or block.mark.nightly is not nightly:
                continue
            printed, said, began = io.StringIO(), io.StringIO(), time.monotonic()
            try:
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
                    run_block(block)
                if block.shown is not None and not block.mark.not_run:
                    compare(block.shown, printed.getvalue())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is the block's failure
                trace = "".join(traceback.format_exception(error)[-3:])
                output = f"{printed.getvalue()[-4000:]}{said.getvalue()[-4000:]}"
                yield f"{block.place}: {type(error).__name__}: {error}\n{output}\n{trace}"
            else:
                done = "read" if block.mark.not_run else f"ran in {time.monotonic() - began:.1f} s"
                print(f"{page.relative_to(ROOT)}:{block.line}: {block.language} {done}", flush=True)


def compare(shown: str, printed: str) -> None:
    """Raise ValueError if a block prints something else than the text below it shows."""
    wanted, found = ([line.rstrip() for line in text.strip().splitlines()] for text in (shown, printed))
    if "…" in wanted:  # lines between are left out
        wanted = [line for line in wanted if line != "…"]
        found = [line for line in found if line in {*wanted}]
    if wanted != found:
        difference = "\n".join(difflib.unified_diff(wanted, found, "shown", "printed", lineterm=""))
        raise ValueError(f"it prints something else than the text below it:\n{difference}")


def given_files(folder: Path, page: Path) -> None:
    """Lay down what the pages call yours, where the page speaks of it: a model, rows, rewards."""
    text = page.read_text(encoding="utf-8")
    for file in sorted((ROOT / GIVEN / "files").iterdir()):
        if file.name in text:
            (folder / file.name).write_bytes(file.read_bytes())
    if "./my-model" in text:
        from rl_launcher.quickstart.tiny_model import build

        model, tokenizer = build(seed=0)
        model.save_pretrained(folder / "my-model")
        tokenizer.save_pretrained(folder / "my-model")


def run_block(block: Block) -> None:
    """Run one block, or read it if it is not run; anything that it raises is its failure."""
    if block.mark.given and block.language != "python":
        runpy.run_path(str(ROOT / GIVEN / block.mark.given))  # it lays down files
    match block.language:
        case "python" if block.mark.not_run:
            import_only(block)
        case "python":
            run_python(block)
        case "yaml":
            read_recipe(block)
        case "toml":
            tomllib.loads(block.text)
        case _:
            for words in block.commands:
                run_command(words, block)


def import_only(block: Block) -> None:
    """Import from our packages what the block imports; all of it must exist, but for what needs what is not here."""
    ours = {package.import_name for package in REPOSITORY.packages.values()}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ours:
            try:
                module = importlib.import_module(str(node.module))
            except ModuleNotFoundError as error:
                absent = str(error.name).partition(".")[0]
                if absent in ours or not str(block.mark.not_run).startswith(("needs vLLM", "needs an extra")):
                    raise
                continue
            for alias in node.names:
                getattr(module, alias.name)  # an AttributeError says which one is not there


def run_python(block: Block) -> None:
    """Execute the block, after what it is given."""
    if named := re.match(r"# (\w+\.py)\n", block.text):
        Path(named[1]).write_text(block.text, encoding="utf-8")
    given = (ROOT / GIVEN / block.mark.given).read_text(encoding="utf-8") if block.mark.given else ""
    if block.mark.ranks > 1:
        # No rank leaves while another still talks to it, nor ends Python while a thread of gloo frees what its last
        # collective used: torch 2.13 would abort.
        end = "import os, sys\nimport torch.distributed as dist\ndist.barrier()\nsys.stdout.flush()\nos._exit(0)\n"
        Path("program.py").write_text(f"{given}\n{block.text}\n{end}", encoding="utf-8")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={block.mark.ranks}", "program.py"]
        _run([sys.executable, *launch])
        return
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(given, f"{GIVEN}/{block.mark.given}", "exec"), names)  # noqa: S102
    code = "\n" * block.line + block.text  # so that a traceback has the lines of the page
    exec(compile(code, str(block.page), "exec"), names)  # noqa: S102


def read_recipe(block: Block) -> None:
    """Validate and explain a recipe as `rl-launcher` does; of one that is not run, only check its keys."""
    named = re.match(r"# (\w+\.yaml)\n", block.text)
    file = Path(named[1] if named else "part.yaml")
    whole = re.search(r"^defaults:", block.text, flags=re.MULTILINE)
    file.write_text(block.text if whole else f"defaults: quickstart\n{block.text}", encoding="utf-8")
    if block.mark.not_run:
        check_keys(file, [])
    else:
        call(["rl-launcher", "explain", str(file)])


def check_keys(recipe: Path, overrides: Sequence[str]) -> None:
    """Load a recipe with what overrides it, against the schema."""
    from rl_launcher.recipe_files import load_recipe
    from rl_launcher.schema import Recipe

    load_recipe(recipe, schema=Recipe, overrides=overrides)


def run_command(words: Sequence[str], block: Block) -> None:
    """Carry one command out, or as much of it as its mark allows."""
    kept = list(words)
    match kept:
        case ["python" | "python3", "-m", module, *rest] if module.partition(".")[0] in IMPORT_NAMES:
            kept = [f"-m {module}", *rest]
        case ["pip", "install", *asked]:
            check_extras(asked)
            return
        case ["nox", *arguments]:
            _run([sys.executable, "-m", "nox", "--list", *_before_posargs(arguments)], cwd=ROOT)
            return
        case ["pytest", *arguments]:
            _check_paths(arguments)
            return
        case ["python", str(program), *rest] if not block.mark.not_run:
            _run([sys.executable, program, *rest])
            return
        case [str(first), *_] if first in ALLOWED or (ROOT / first).is_file():
            return
        case [str(first), *_] if first not in ENTRY_POINTS:
            if block.mark.not_run:
                return
            raise ValueError(f"{first} is no command of ours: mark the block as not run, with the reason")
    if not block.mark.not_run:
        call(kept, exits=block.mark.exits)
        return
    knows_options(kept)
    match kept:
        case ["rl-launcher", "run", recipe, *overrides] if all("=" in each for each in overrides):
            shipped = ROOT / "recipes" / f"{recipe}.yaml"
            if shipped.is_file() or Path(recipe).is_file():
                check_keys(shipped if shipped.is_file() else Path(recipe), overrides)


IMPORT_NAMES = {package.import_name for package in REPOSITORY.packages.values()}


def call(words: Sequence[str], *, exits: Sequence[int] = (0,)) -> str:
    """Call a command of ours in this process, by its entry point; return what it prints."""
    first, *arguments = words
    printed = io.StringIO()
    before, code = sys.argv, 0
    try:
        sys.argv = [first, *arguments]
        with contextlib.redirect_stdout(printed):
            if first.startswith("-m "):
                code = _run_module(first.removeprefix("-m "))
            else:
                module, _, function = ENTRY_POINTS[first].partition(":")
                code = getattr(importlib.import_module(module), function)() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
        print(printed.getvalue())
    if code not in exits:
        raise ValueError(f"{' '.join(words)} ended with {code}, not with {' or '.join(map(str, exits))}")
    return printed.getvalue()


def _run_module(module: str) -> int:
    sys.argv[0] = module
    runpy.run_module(module, run_name="__main__", alter_sys=False)
    return 0


def knows_options(words: Sequence[str]) -> None:
    """Ask the command, and its subcommand, for help; it must speak of every option that is given."""
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    plain = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)]
    for depth in (2, 1, 0):  # `render slurm`, `run`, or none
        if len(plain) < depth:
            continue
        try:
            said = call([words[0], *plain[:depth], "--help"])
        except ValueError:
            continue
        if absent := [option for option in options if option not in said]:
            raise ValueError(f"{' '.join(words[:2])} --help knows no {', '.join(absent)}")
        if depth or not plain:
            return
    raise ValueError(f"{' '.join(words)}: no such command")


def check_extras(asked: Sequence[str]) -> None:
    """Refuse extras that the named package of ours does not have."""
    for word in asked:
        name, _, extras = word.rstrip("]").partition("[")
        if name in REPOSITORY.packages and extras:
            known = REPOSITORY.packages[name].pyproject["project"].get("optional-dependencies", {})
            if absent := [extra for extra in extras.split(",") if extra not in known]:
                raise ValueError(f"{name} has no extra {', '.join(absent)}, only {', '.join(known)}")


def _before_posargs(arguments: Sequence[str]) -> list[str]:
    return list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)


def _check_paths(arguments: Sequence[str]) -> None:
    for word in arguments:
        if "/" in word and not (ROOT / word.partition("::")[0]).exists():
            raise ValueError(f"there is no {word}")


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    """Run a program to its end; what it prints is in the error if it fails."""
    paths = os.pathsep.join(dict.fromkeys(filter(None, sys.path)))
    variables = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=variables, check=False, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise ValueError(
            f"{' '.join(command[-3:])} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        )
    print(done.stdout)


if __name__ == "__main__":
    main()
