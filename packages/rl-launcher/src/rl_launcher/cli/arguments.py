"""Arguments and options shared by several commands, and their shell completion."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rl_launcher.cli.console import or_refuse, warn
from rl_launcher.recipe_files.dataclass_schema import docstrings
from rl_launcher.recipe_files.shipped import SCHEMA_FILE, find_recipe, shipped_recipes

if TYPE_CHECKING:
    from rl_launcher.recipe_files import Resolved
    from rl_launcher.schema import Recipe


def complete_recipes(incomplete: str) -> list[str]:
    """Complete names of shipped recipes and paths of YAML files."""
    begun = Path(incomplete)
    folder = begun if incomplete.endswith("/") else begun.parent
    files = [str(path) for path in folder.glob("*.y*ml")] if folder.is_dir() else []
    return [name for name in (*shipped_recipes(), *files) if name.startswith(incomplete)]


def complete_keys(incomplete: str) -> list[str]:
    """Complete dotted keys, from the schema for editors: the dataclasses take seconds to import, at each key press."""
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
        help="`section.key=value`, any number of them.",
        show_default=False,
        autocompletion=complete_keys,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of stdout.", show_default=False)
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON that holds every figure.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Print the whole traceback of an error.")]


def load(recipe: Path, overrides: list[str] | None, *, print_notes: bool = True) -> "Resolved[Recipe]":
    """Read a recipe and print its notes to stderr, or refuse on one screen."""
    from rl_launcher.recipe_files import load_recipe
    from rl_launcher.schema import Recipe

    resolved = or_refuse(lambda: load_recipe(find_recipe(recipe), schema=Recipe, overrides=overrides or ()))
    for note in resolved.notes if print_notes else ():
        warn(note)
    return resolved


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


Flags = dict[str, Any]
"""Values of the options by the name of their field; lists as tuples."""


def with_flags(
    command: Callable[..., None], sections: Mapping[str, type], *, leave_out: tuple[str, ...] = ()
) -> Callable[..., None]:
    """Return `command` with an option for each field of the dataclasses in `sections`, by prefix of the option.

    `command` receives their values as its last argument, `flags`.
    """
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [each.replace(annotation=hints[each.name]) for each in own if each.name != "flags"]
    options = [
        option
        for prefix, section in sections.items()
        for option in _options(section, prefix)
        if option.name not in leave_out
    ]

    def run(**given: Any) -> None:
        flags = {option.name: given.pop(option.name) for option in options}
        command(**given, flags={name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()})

    run.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {each.name: each.annotation for each in (*parameters, *options)}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _options(section: type, prefix: str) -> Iterator[inspect.Parameter]:
    help_of, hints = docstrings(section), get_type_hints(section)
    for field in fields(section):
        hint, name = hints[field.name], prefix + field.name
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if hint is bool else [f"--{flag}"]
        option = typer.Option(*names, help=help_of.get(field.name, ""), show_default=field.default is not None)
        many = hint == tuple[str, ...]
        default: Any = [] if many else ... if field.default is MISSING else field.default
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[list[str] if many else hint, option],
        )
