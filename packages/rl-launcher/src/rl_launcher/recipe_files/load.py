"""`load_recipe`: YAML files and overrides as a validated dataclass with the origin of every value.

The value is YAML (`lr=1e-5`, `eval=null`, `betas=[0.9, 0.99]`); a mapping merges, a list replaces whole, and the last
of two overrides of one key wins. A key which itself holds a dot cannot be reached. Does not know which keys exist.

The result is always text: a variable that holds `3` does not become a number. `$${` stands for a literal `${`; any
other `${` is refused. Done after merging, so that a variable is not asked for where its value is replaced. Keys are
left alone.

Does not know how recipes are read.

    files and what they inherit -> overrides -> ${env:…} -> the schema

Other names of keys, which a section of the schema may declare, become its own in each file, before merging.

Generic over the schema: knows no key by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from rl_launcher.recipe_files.dataclass_schema import Names, Renamed, check_schema, to_plain
from rl_launcher.recipe_files.problems import DEFAULT, KeyPath, Node, Origin, Problem, RecipeError, dotted, shorten
from rl_launcher.recipe_files.validate import reading_order, validate
from rl_launcher.recipe_files.yaml_source import Prepare, as_written, compose, dump, merge, read_recipe

_KEY = re.compile(r"[^\s.=+~\-][^\s.=]*(\.[^\s.=]+)*")


def override(recipe: Node, texts: Sequence[str], *, prepare: Prepare = as_written) -> tuple[Node, list[Problem]]:
    """Return `recipe` with the overrides merged in order, and a problem for each that cannot be read."""
    problems: list[Problem] = []
    for text in texts:
        node, found = _read_override(text)
        problems += found
        if node is not None:
            recipe = merge(recipe, prepare(node))
    return recipe, problems


def _read_override(text: str) -> tuple[Node | None, list[Problem]]:
    origin = Origin(override=text)
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        message = "no `=` in it" if not equals else f"{key!r} is not a dotted key"
        hint = "write key=value without spaces or prefixes, as in grpo.max_num_steps=10"
        return None, [Problem(key="", where=origin, message=message, hint=hint)]
    node, problems = compose(value, lambda _line, _column: origin)
    if problems:
        return None, [replace(problem, key=key) for problem in problems]
    if node is None:
        hint = f"write {key}=null to switch it off, {key}=\"''\" for an empty text"
        return None, [Problem(key=key, where=origin, message="nothing after the `=`", hint=hint)]
    for name in reversed(key.split(".")):
        node = Node(value={name: node}, origin=origin, key=origin)
    return node, []


_REFERENCE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^{}]*))?\}|(?P<wrong>\$\{[^}]*\}?)"
)
_FORMS = "write ${env:NAME} or ${env:NAME:default}; $${ for a literal ${"


def interpolate(node: Node, *, environment: Mapping[str, str], path: KeyPath = ()) -> tuple[Node, list[Problem]]:
    """Return `node` with every reference replaced, and a problem for each that cannot be; those stay as they are."""
    if isinstance(node.value, str):
        return _text(node, node.value, environment=environment, path=path)
    problems: list[Problem] = []
    children: dict[str | int, Node] = {}
    for name, child in node.children():
        children[name], found = interpolate(child, environment=environment, path=(*path, name))
        problems += found
    if isinstance(node.value, Mapping):
        return replace(node, value={str(name): child for name, child in children.items()}), problems
    return (replace(node, value=list(children.values())) if isinstance(node.value, list) else node), problems


def escape(plain: object) -> object:
    """Return plain data whose texts survive `interpolate` unchanged."""
    if isinstance(plain, str):
        return plain.replace("${", "$${")
    if isinstance(plain, Mapping):
        return {name: escape(value) for name, value in plain.items()}
    return [escape(item) for item in plain] if isinstance(plain, list) else plain


def _text(node: Node, text: str, *, environment: Mapping[str, str], path: KeyPath) -> tuple[Node, list[Problem]]:
    problems: list[Problem] = []

    def refuse(message: str, hint: str) -> None:
        problems.append(Problem(key=dotted(path), where=node.where, message=message, hint=hint))

    def replacement(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match["escaped"]:
            return "${"
        if match["wrong"]:
            refuse(f"{match['wrong']} is not a reference", _FORMS)
            return match[0]
        if name not in environment and default is None:
            refuse(f"environment variable {name} is not set", f"export {name}=… or write ${{env:{name}:default}}")
            return match[0]
        return str(environment.get(name, default))

    replaced = _REFERENCE.sub(replacement, text)
    return (node if problems else replace(node, value=replaced)), problems


T = TypeVar("T")
_MAX_VALUE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """The outcome of `load_recipe`."""

    value: T
    """The schema's dataclass, valid."""

    origins: Mapping[str, Origin]
    """Where each key was written, by dotted key. Lists are one key; `str(origin)` is what `explain` prints."""

    renamed: tuple[Renamed, ...] = ()
    """Keys that were written under another name that they have."""

    def to_yaml(self) -> str:
        """Return every key with its value, defaults included, as a recipe that loads as an equal value."""
        return dump(escape(to_plain(self.value)))

    def explain(self, *, hide: Callable[[object], object] = lambda plain: plain) -> str:
        """Return one aligned line for each key: `key  value  origin`.

        `hide` gets the plain recipe before it is printed, and keeps its keys.
        """
        rows = [
            (dotted(path), shorten(json.dumps(value, ensure_ascii=False), _MAX_VALUE), str(self.origins[dotted(path)]))
            for path, value in _leaves(hide(to_plain(self.value)))
        ]
        key_width = max((len(key) for key, _, _ in rows), default=0)
        value_width = max((len(value) for _, value, _ in rows), default=0)
        lines = [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in rows]
        return "\n".join([*lines, *map(str, self.renamed)])


def resolve(value: T, recipe: Node, *, renamed: tuple[Renamed, ...] = ()) -> Resolved[T]:
    """Bring a configured value and the recipe that it was made from together."""
    origins: dict[str, Origin] = {}
    for path, _ in _leaves(to_plain(value)):
        node, written = recipe.nearest(path)
        origins[dotted(path)] = node.key if written else DEFAULT
    return Resolved(value=value, origins=MappingProxyType(origins), renamed=renamed)


def _leaves(plain: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(plain, dict) and (plain or not path):
        for name, inner in plain.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, plain


def load_recipe(path: str | Path, *, schema: type[T], overrides: Sequence[str] = ()) -> Resolved[T]:
    """Read a recipe with what it inherits, apply `overrides` (`a.b.c=value`) in order and validate.

    Raises:
        RecipeError: with every problem that could be found; `problems` are data, `str()` is one screen of text.
        TypeError: `schema` breaks the rules of schemas (a fault of the program, not of the recipe).
    """
    check_schema(schema)
    names = Names(schema)
    recipe, problems = override(read_recipe(Path(path), prepare=names.own), overrides, prepare=names.own)
    problems += names.problems
    recipe, found = interpolate(recipe, environment=os.environ)
    value, invalid = validate(recipe, schema)
    blamed = {problem.key for problem in found}
    problems += sorted([*found, *(wrong for wrong in invalid if wrong.key not in blamed)], key=reading_order)
    if problems or value is None:
        raise RecipeError(str(path), problems)
    return resolve(value, recipe, renamed=tuple(names.renamed))


def resolve_path(value: str | Path, base: Path | None = None) -> Path:
    """Return the absolute path that a value of a recipe means.

    Relative paths are relative to the current directory, as in a shell, and not to the file that holds them: one
    recipe serves many directories. `~` is the home directory. `base` stands in for the current directory.
    """
    return (base or Path.cwd()).absolute() / Path(value).expanduser()
