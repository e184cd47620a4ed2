"""The arguments that several commands take, how a shell completes them, and a recipe read from them."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_launcher.cli.console import or_refuse
from rl_launcher.shipped import SCHEMA_FILE, find_recipe, shipped_recipes

if TYPE_CHECKING:
    from rl_launcher.recipe import Resolved
    from rl_launcher.recipe_schema import Recipe

__all__ = ["Json", "Overrides", "RecipeFile", "RunPath", "load"]


def complete_recipes(incomplete: str) -> list[str]:
    """Shipped names, and YAML files of the directory that was begun."""
    begun = Path(incomplete)
    folder = begun if incomplete.endswith("/") else begun.parent
    files = [str(path) for path in folder.glob("*.y*ml")] if folder.is_dir() else []
    return [name for name in (*shipped_recipes(), *files) if name.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[str]:
    """Dotted keys, from the schema for editors: importing the real one would take seconds at each press of a key."""
    if "=" in incomplete:
        return []
    return [f"{key}=" for key in _dotted_keys() if key.startswith(incomplete)]


RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe (`rl-launcher recipes list`).",
        show_default=False,
        autocompletion=complete_recipes,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="`section.key=value`, as many as you like.",
        show_default=False,
        autocompletion=complete_keys,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON that holds every figure.")]


def load(recipe: Path, overrides: list[str] | None) -> "Resolved[Recipe]":
    """Read a recipe, or refuse on one screen."""
    from rl_launcher.recipe import load_recipe
    from rl_launcher.recipe_schema import Recipe

    return or_refuse(lambda: load_recipe(find_recipe(recipe), schema=Recipe, overrides=overrides or ()))


@cache
def _dotted_keys() -> list[str]:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    definitions = schema.get("$defs", {})
    found: list[str] = []

    def walk(section: dict[str, Any], prefix: str, inside: tuple[str, ...]) -> None:
        for name, key in section.get("properties", {}).items():
            choices = [key, *key.get("anyOf", [])]
            references = [choice["$ref"].rpartition("/")[2] for choice in choices if "$ref" in choice]
            if not references:
                found.append(prefix + name)
            for reference in references:
                if reference not in inside:
                    walk(definitions[reference], f"{prefix}{name}.", (*inside, reference))

    root = schema if "properties" in schema else definitions[schema["$ref"].rpartition("/")[2]]
    walk(root, "", ())
    return found
