"""The recipes that come with the package: find one by name, list them, copy one with what it inherits."""

import shutil
from pathlib import Path

import yaml

from rl_launcher.errors import Refusal
from rl_launcher.recipe_files.problems import SHIPPED, nearest

SCHEMA_FILE = SHIPPED / "recipe.schema.json"
"""JSON schema for editors; every shipped recipe names it in its first line."""


def shipped_recipes() -> dict[str, Path]:
    """Return the path of each shipped recipe by its name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_recipe(text: str | Path) -> Path:
    """Return the file that `text` names: an existing one, else a shipped recipe by its name.

    The path of a missing YAML file is returned as it is, since `load_recipe` names files like it, unless a shipped
    recipe has that name.

    Raises:
        Refusal: it is neither.
    """
    path, known = Path(text), shipped_recipes()
    if path.exists():
        return path
    if path.suffix in {".yaml", ".yml"}:
        if path.stem in known:
            raise Refusal(
                f"there is no file {text}; a recipe of that name is shipped: write {path.stem} instead, or "
                f"`rl-launcher recipes copy {path.stem} FOLDER` to edit it"
            )
        return path
    if str(text) in known:
        return known[str(text)]
    like = nearest(str(text), list(known))
    hint = f"did you mean {like[0]}?" if like else "`rl-launcher recipes list` lists the shipped ones"
    raise Refusal(f"there is no file {text}, and no recipe of that name is shipped; {hint}")


def shipped_recipe(name: str) -> Path:
    """Return the file of a shipped recipe.

    Raises:
        Refusal: there is no such recipe; the message names the nearest one.
    """
    known = shipped_recipes()
    if name not in known:
        like = nearest(name, list(known))
        hint = f"did you mean {like[0]}?" if like else f"there are {', '.join(known)}"
        raise Refusal(f"no recipe called {name!r} is shipped; {hint}")
    return known[name]


def about(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text.startswith("yaml-language-server"):
            lines.append(text)
    return " ".join(lines).partition(". ")[0].rstrip(".")


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a shipped recipe, what it inherits, and the schema into the folder `to`; nothing is overwritten.

    Raises:
        Refusal: there is no such recipe, or one of the files exists already.
    """
    sources = [*_chain(shipped_recipe(name)), SCHEMA_FILE]
    targets = [to / source.relative_to(SHIPPED) for source in sources]
    for target in targets:
        if target.exists() and target.name != SCHEMA_FILE.name:
            raise Refusal(f"{target} exists already, and nothing is overwritten; choose another folder")
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return targets


def _chain(path: Path) -> list[Path]:
    """Return a recipe and those it inherits."""
    written = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults") or []
    names = [written] if isinstance(written, str) else written
    return [path, *(file for name in names for file in _chain((path.parent / name).resolve()))]
