"""`load_recipe`: a YAML file, a shipped recipe or a dict, with overrides, as a validated dataclass with origins.

    file or dict, with the recipes it inherits -> overrides -> ${env:…} -> schema

Mappings merge; lists and scalars replace; `null` switches off what was there. `defaults: base.yaml`, or a list whose
later entries win, names the recipes to start from: paths relative to the file that names them, or shipped recipes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from rl_launcher.recipe_files.dataclass_schema import DEFAULTS_KEY, check_schema, own_names, to_plain
from rl_launcher.recipe_files.nodes import Node, leaves, merge, node_of
from rl_launcher.recipe_files.problems import (
    DEFAULT,
    SHIPPED,
    KeyPath,
    Origin,
    Problem,
    RecipeError,
    dotted,
    nearest,
    reading_order,
    shorten,
)
from rl_launcher.recipe_files.validate import validate
from rl_launcher.recipe_files.yaml_source import compose, dump, split_lines

T = TypeVar("T")
Overrides = Sequence[str] | Mapping[str, Any]
_MAX_VALUE = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """The outcome of `load_recipe`."""

    value: T
    """The schema's dataclass, valid."""

    origins: Mapping[str, Origin]
    """Where each key was written, by dotted key. A list is one key; `str(origin)` is what `explain` prints."""

    notes: tuple[str, ...] = ()
    """What the reader should know about how the recipe was read: aliases that were used, a shortened warm-up."""

    def to_yaml(self, *, hide: Callable[[object], object] = lambda plain: plain) -> str:
        """Return every key with its value, defaults included, as a recipe that loads as an equal value.

        `hide` receives the plain recipe before it is written, and may replace values.
        """
        return dump(escape(hide(to_plain(self.value))))

    def explain(self, *, hide: Callable[[object], object] = lambda plain: plain) -> str:
        """Return one aligned line for each key, `key  value  origin`, then the notes. `hide` is as in `to_yaml`."""
        rows = [
            (dotted(path), shorten(json.dumps(value, ensure_ascii=False), _MAX_VALUE), str(self.origins[dotted(path)]))
            for path, value in leaves(hide(to_plain(self.value)))
        ]
        key_width = max((len(key) for key, _, _ in rows), default=0)
        value_width = max((len(value) for _, value, _ in rows), default=0)
        lines = [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in rows]
        return "\n".join([*lines, *self.notes])


def load_recipe(recipe: str | Path | Mapping[str, Any], *, schema: type[T], overrides: Overrides = ()) -> Resolved[T]:
    """Read a recipe with what it inherits, apply `overrides` in order and validate.

    Args:
        recipe: The path of a YAML file, or the recipe itself as a dict, whose `defaults` are relative to the current
            directory.
        schema: A dataclass; see `check_schema`. Its class method `adjust(recipe: Node)`, if there is one, returns the
            merged recipe with changes and a list of sentences that become `Resolved.notes`.
        overrides: Texts `a.b.c=value`, where the value is YAML and the last of two overrides of one key wins; or a
            mapping of Python values whose keys may be dotted (`{"grpo.max_num_steps": 5}`) or nested.

    Raises:
        RecipeError: with every problem that was found; `problems` are data, `str()` is one screen of text.
        TypeError: `schema` breaks the rules of schemas (a bug of the program, not a mistake in the recipe).
    """
    check_schema(schema)
    problems: list[Problem] = []
    notes: list[str] = []

    def own(node: Node) -> Node:  # aliases become the key itself before merging, so files may use either name
        return own_names(node, schema, problems=problems, notes=notes)

    if isinstance(recipe, Mapping):
        name = "given in Python"
        written = _from_python(recipe, Origin(python=True), problems)
        merged = _with_inherited(own(written), folder=Path(), chain=(), own=own)
    else:
        name = str(recipe)
        merged = _read(Path(recipe), chain=(), own=own)
    for override in _read_overrides(overrides, problems):
        merged = merge(merged, own(override))
    merged, unresolved = _interpolate(merged, environment=os.environ)
    if (adjust := getattr(schema, "adjust", None)) is not None:
        merged, adjusted = adjust(merged)
        notes += adjusted
    value, invalid = validate(merged, schema)
    blamed = {problem.key for problem in (*problems, *unresolved)} - {""}
    problems += sorted([*unresolved, *(wrong for wrong in invalid if wrong.key not in blamed)], key=reading_order)
    if problems or value is None:
        raise RecipeError(name, problems)
    origins: dict[str, Origin] = {}
    for path, _ in leaves(to_plain(value)):
        node, is_written = merged.find(path)
        origins[dotted(path)] = node.key if is_written else DEFAULT
    return Resolved(value=value, origins=MappingProxyType(origins), notes=tuple(notes))


# -- Files and what they inherit --------------------------------------------------------------------


def _read(path: Path, *, chain: tuple[Path, ...], own: Callable[[Node], Node]) -> Node:
    return _with_inherited(own(read_file(path)), folder=path.parent, chain=(*chain, path), own=own)


def _with_inherited(written: Node, *, folder: Path, chain: tuple[Path, ...], own: Callable[[Node], Node]) -> Node:
    assert isinstance(written.value, dict)
    declaration = written.value.get(DEFAULTS_KEY)
    if declaration is None:
        return written
    names = declaration.value if isinstance(declaration.value, list) else [declaration]
    if not all(isinstance(name.value, str) and name.value for name in names):
        message = f"`defaults` names the recipes to start from, got {declaration.plain()!r}"
        hint = "write `defaults: base.yaml` or a list of paths"
        raise _bad_defaults(declaration, chain, message=message, hint=hint)
    merged = Node(value={}, origin=written.origin, key=written.key)
    for name in names:
        merged = merge(merged, _read(_find_base(name, folder, chain), chain=chain, own=own))
    return merge(merged, written.with_value((DEFAULTS_KEY,), None))


def _find_base(name: Node, folder: Path, chain: tuple[Path, ...]) -> Path:
    """Return the file that an entry of `defaults` names: beside the recipe, else a shipped one.

    A recipe called grpo.yaml may start from the shipped `grpo.yaml`, so naming itself means the shipped one.
    """
    text = str(name.value)
    beside = folder / text
    shipped = SHIPPED / (text if text.endswith((".yaml", ".yml")) else f"{text}.yaml")
    is_itself = bool(chain) and beside.resolve() == chain[-1].resolve()
    if Path(text).name == text and shipped.is_file() and (is_itself or not beside.is_file()):
        return shipped
    arrows = " → ".join(str(link) for link in (*chain, beside))
    if beside.resolve() in [link.resolve() for link in chain]:
        message = f"recipes inherit one another in a circle: {arrows}"
        raise _bad_defaults(name, chain, message=message, hint="remove one of these `defaults`")
    if not beside.is_file():
        message = f"there is no file {beside}, inherited through {arrows}"
        raise _bad_defaults(name, chain, message=message, hint=_like(beside, besides=chain))
    return beside


def _bad_defaults(node: Node, chain: tuple[Path, ...], *, message: str, hint: str) -> RecipeError:
    problem = Problem(key=DEFAULTS_KEY, where=node.where, message=message, hint=hint)
    return RecipeError(str(chain[0]) if chain else "given in Python", [problem])


def _like(path: Path, *, besides: Sequence[Path] = ()) -> str:
    """Say which file or shipped recipe a missing `path` may mean; never one of `besides`, which name it."""
    named = {link.resolve() for link in besides}
    files = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    if like := nearest(str(path), sorted(str(file) for file in files if file.resolve() not in named), cutoff=0.7):
        return f"did you mean {like[0]}?"
    if like := nearest(path.stem, [file.stem for file in SHIPPED.glob("*.yaml")], cutoff=0.75):
        return f"did you mean the shipped recipe {like[0]}? `rl-launcher recipes copy {like[0]} FOLDER` copies it"
    return (
        f"looked in {path.parent.absolute()}; shipped recipes may be named too (`rl-launcher recipes list`), or "
        f"copied with `rl-launcher recipes copy NAME FOLDER`"
    )


def read_file(path: Path) -> Node:
    """Read one recipe file, without what it inherits.

    Raises:
        RecipeError: the file is missing, empty, not a mapping or not YAML of this dialect.
    """
    origin = Origin(file=path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _bad_file(path, f"there is no file {path}", _like(path)) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise _bad_file(path, message, "save the file as UTF-8") from None
    except OSError as error:
        raise _bad_file(path, f"cannot be read: {error.strerror}", "give the path of a YAML file") from None
    lines = split_lines(text)

    def at(line: int, column: int) -> Origin:
        return replace(origin, line=line + 1, column=column + 1, source=lines[line] if line < len(lines) else "")

    root, problems = compose(text, at)
    if problems:
        raise RecipeError(str(path), problems)
    hint = "write `key: value` lines"
    if root is None:
        raise _bad_file(path, "the file is empty", hint)
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        message = f"a recipe is a mapping of keys to values, this file holds {kind}"
        raise _bad_file(path, message, hint, where=root.origin)
    return replace(root, key=origin)


def _bad_file(path: Path, message: str, hint: str, *, where: Origin | None = None) -> RecipeError:
    return RecipeError(str(path), [Problem(key="", where=where or Origin(file=path), message=message, hint=hint)])


# -- Overrides and Python values --------------------------------------------------------------------

_KEY = re.compile(r"[^\s.=+~\-][^\s.=]*(\.[^\s.=]+)*")


_OVERRIDE = "write key=value without spaces or prefixes, as in grpo.max_num_steps=10"


def _read_overrides(overrides: Overrides, problems: list[Problem]) -> Iterator[Node]:
    """Yield each readable override as a recipe of one key."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            origin = Origin(python=True, override=key)
            if _KEY.fullmatch(key):
                yield _nested(key, _from_python(value, origin, problems, path=(key,)), origin)
            else:
                problems.append(Problem(key="", where=origin, message=f"{key!r} is not a dotted key", hint=_OVERRIDE))
        return
    for text in overrides:
        origin = Origin(override=text)
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key):
            message = f"{key!r} is not a dotted key" if equals else "no `=` in it"
            problems.append(Problem(key="", where=origin, message=message, hint=_OVERRIDE))
            continue
        node, found = compose(value, lambda _line, _column, origin=origin: origin)  # type: ignore[misc]
        problems += [replace(problem, key=key) for problem in found]
        if node is not None:
            yield _nested(key, node, origin)
        elif not found:
            hint = f"write {key}=null to switch it off, {key}=\"''\" for an empty text"
            problems.append(Problem(key=key, where=origin, message="nothing after the `=`", hint=hint))


def _nested(key: str, node: Node, origin: Origin) -> Node:
    for name in reversed(key.split(".")):
        node = Node(value={name: node}, origin=origin, key=origin)
    return node


def _from_python(value: object, origin: Origin, problems: list[Problem], *, path: KeyPath = ()) -> Node:
    """Return a Python value as a node; dataclasses, enums and paths become what they are in YAML."""
    if isinstance(value, Mapping):
        inner = {
            str(name): _from_python(item, origin, problems, path=(*path, str(name))) for name, item in value.items()
        }
        return Node(value=inner, origin=origin, key=origin)
    try:
        return node_of(to_plain(value), origin)
    except (TypeError, ValueError):
        message = f"a value of type {type(value).__name__} cannot be written into a recipe"
        hint = "a recipe holds numbers, texts, booleans, None, lists and dicts; pass objects as arguments of their own"
        problems.append(Problem(key=dotted(path), where=origin, message=message, hint=hint))
        return Node(value=None, origin=origin, key=origin)


# -- ${env:NAME} ------------------------------------------------------------------------------------

_REFERENCE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^{}]*))?\}|(?P<wrong>\$\{[^}]*\}?)"
)


def _interpolate(node: Node, *, environment: Mapping[str, str], path: KeyPath = ()) -> tuple[Node, list[Problem]]:
    """Return `node` with every reference replaced, and a problem for each that cannot be replaced.

    The result is always text: a variable that holds `3` does not become a number. `$${` stands for a literal `${`.
    This runs after merging, so that a variable is not looked up if its value is overridden.
    """
    problems: list[Problem] = []
    if not isinstance(node.value, str):
        children: dict[str | int, Node] = {}
        for name, child in node.children():
            children[name], found = _interpolate(child, environment=environment, path=(*path, name))
            problems += found
        if isinstance(node.value, dict):
            return replace(node, value={str(name): child for name, child in children.items()}), problems
        return (replace(node, value=list(children.values())) if isinstance(node.value, list) else node), problems

    def refuse(message: str, hint: str) -> None:
        problems.append(Problem(key=dotted(path), where=node.where, message=message, hint=hint))

    def replacement(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match["escaped"]:
            return "${"
        if match["wrong"]:
            hint = "write ${env:NAME} or ${env:NAME:default}; $${ for a literal ${"
            refuse(f"{match['wrong']} is not a reference", hint)
        elif name not in environment and default is None:
            refuse(f"environment variable {name} is not set", f"export {name}=… or write ${{env:{name}:default}}")
        else:
            return str(environment.get(name, default))
        return match[0]

    replaced = _REFERENCE.sub(replacement, node.value)
    return (node if problems else replace(node, value=replaced)), problems


def escape(plain: object) -> object:
    """Return plain data whose texts survive the replacement of `${…}` unchanged."""
    if isinstance(plain, str):
        return plain.replace("${", "$${")
    if isinstance(plain, Mapping):
        return {name: escape(value) for name, value in plain.items()}
    return [escape(item) for item in plain] if isinstance(plain, list) else plain
