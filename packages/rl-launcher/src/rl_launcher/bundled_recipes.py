"""The recipes that come with the package: found by name, listed, copied with all that they start from.

Reads text; validates nothing.
"""

import shutil
from pathlib import Path

import yaml

from rl_launcher.errors import Refusal
from rl_launcher.recipe_files.problems import nearest

__all__ = ["SCHEMA_FILE", "about", "copy_recipe", "find_recipe", "shipped_recipes"]

FOLDER = Path(__file__).parent / "recipes"
SCHEMA_FILE = FOLDER / "recipe.schema.json"
"""By which editors complete and check recipes; every shipped recipe names it in its first line."""


def shipped_recipes() -> dict[str, Path]:
    """Each shipped recipe by its name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def find_recipe(text: str | Path) -> Path:
    """The file that `text` names: one that is there, else a shipped recipe by its name.

    A YAML file that is not there is returned as it is, for the reader of recipes to say what is like it; but where a
    shipped recipe is called so, that is said here.

    Raises:
        Refusal: it is neither.
    """
    path, known = Path(text), shipped_recipes()
    if path.exists():
        return path
    if path.suffix in {".yaml", ".yml"}:
        if path.stem in known:
            raise Refusal(
                f"there is no file {text}; a recipe of that name is shipped: say {path.stem} in its place, or "
                f"`rl-launcher recipes copy {path.stem} FOLDER` to change it"
            )
        return path
    if str(text) in known:
        return known[str(text)]
    like = nearest(str(text), list(known))
    hint = f"did you mean {like[0]}?" if like else "`rl-launcher recipes list` lists the shipped ones"
    raise Refusal(f"there is no file {text}, and no recipe of that name is shipped; {hint}")


def about(path: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text.startswith("yaml-language-server"):
            lines.append(text)
    return " ".join(lines).partition(". ")[0].rstrip(".")


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy a shipped recipe, what it starts from, and the schema into the folder `to`; nothing is overwritten.

    Raises:
        Refusal: there is no such recipe, or one of the files is there already.
    """
    known = shipped_recipes()
    if name not in known:
        like = nearest(name, list(known))
        hint = f"did you mean {like[0]}?" if like else f"there are {', '.join(known)}"
        raise Refusal(f"no recipe called {name!r} is shipped; {hint}")
    sources = [*_chain(known[name]), SCHEMA_FILE]
    targets = [to / source.relative_to(FOLDER) for source in sources]
    for target in targets:
        if target.exists() and target.name != SCHEMA_FILE.name:
            raise Refusal(f"{target} is there already, and nothing is overwritten; choose another folder")
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return targets


def _chain(path: Path) -> list[Path]:
    """A recipe, and those that it starts from."""
    written = yaml.safe_load(path.read_text(encoding="utf-8")).get("defaults") or []
    names = [written] if isinstance(written, str) else written
    return [path, *(file for name in names for file in _chain((path.parent / name).resolve()))]
