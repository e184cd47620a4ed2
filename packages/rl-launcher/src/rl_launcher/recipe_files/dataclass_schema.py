"""What a dataclass schema says about its keys: names, aliases, types, defaults, docstrings; reference page and JSON schema.

A *section* is a dataclass. Knows dataclasses and typing; does not know pydantic or recipes.

A *section* is a dataclass. Knows where pydantic keeps docstrings; does not know recipes.

What is written under another name becomes the key itself before files are merged, so that one file may override another
whichever name each of them took. Writing both in one file is refused. Nothing is renamed in silence: see `renamed`.

Also lays a section's own defaults under a partly written section: with `optimizer: Adam = Adam(lr=3e-4)` a recipe
which writes only `optimizer.eps` keeps `lr` at 3e-4, and not at the default of the class. Knows nothing of files.

Knows schemas; does not know recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, Union

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from rl_launcher.recipe_files.problems import KeyPath, Node, Origin, Problem, default_node, dotted
from rl_launcher.recipe_files.yaml_source import DEFAULTS_KEY

Annotation = Any  # what stands after the colon of a field: a class, a union, `list[int]`, …


def origin_of(annotation: Annotation) -> Annotation:
    """Return `list` for `list[int]`, `Union` for a union, None for a plain class."""
    return typing.get_origin(annotation)


def is_section(annotation: Annotation) -> bool:
    """Whether it is a dataclass."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def key_types(section: type) -> dict[str, Annotation]:
    """Return the keys of a section with their types: fields that its constructor takes."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def members(annotation: Annotation) -> list[Annotation]:
    """Return what a type may be apart from null: one entry, or the members of a union."""
    if origin_of(annotation) is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if isinstance(annotation, typing.NewType):
        return members(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # `type X = …` of Python 3.12
        return members(annotation.__value__)
    if _is_union(annotation):
        return [member for choice in typing.get_args(annotation) for member in members(choice)]
    return [] if annotation is type(None) else [annotation]


def only_section(annotation: Annotation) -> type | None:
    """Return the section that a mapping under this type must be; None if it is another thing or there are several."""
    found = [member for member in members(annotation) if is_section(member)]
    return found[0] if len(found) == 1 else None


def item(annotation: Annotation, name: str | int) -> Annotation:
    """Return the type of what lies under `name` in a value of this type; Any where it is unknown."""
    arguments = typing.get_args(annotation)
    if is_section(annotation):
        return key_types(annotation).get(str(name), Any)
    if not arguments:
        return Any
    if is_mapping(annotation):
        return arguments[-1]
    if origin_of(annotation) is tuple and arguments[-1] is not Ellipsis:
        return arguments[name] if isinstance(name, int) and name < len(arguments) else Any
    return arguments[0]


def sections_in(annotation: Annotation) -> set[type]:
    """Return every section that a value of this type may hold directly, in lists and in mappings too."""
    if is_section(annotation):
        return {annotation}
    parts = members(annotation)
    inner = parts if parts != [annotation] else list(typing.get_args(annotation))
    return set().union(*(sections_in(part) for part in inner))


def type_text(annotation: Annotation) -> str:
    """Return a type as a reader of YAML would say it: `int | null`, `"dpo" | "grpo"`, `list[str]`, `section`."""
    if _is_union(annotation):
        return " | ".join(dict.fromkeys(type_text(member) for member in typing.get_args(annotation)))
    parts = members(annotation)
    if parts and parts != [annotation]:
        return " | ".join(type_text(part) for part in parts)
    choices = choices_of(annotation)
    if choices:
        return " | ".join(literal_text(choice) for choice in choices)
    words: dict[Annotation, str] = {type(None): "null", Any: "any value", Ellipsis: "..."}
    if annotation in words or is_section(annotation):
        return words.get(annotation, "section")
    name = getattr(origin_of(annotation) or annotation, "__name__", str(annotation))
    arguments = ", ".join(type_text(argument) for argument in typing.get_args(annotation))
    return f"{name}[{arguments}]" if arguments else name.replace("Path", "path")


def choices_of(annotation: Annotation) -> tuple[object, ...]:
    """Return the values that a Literal or an Enum admits; nothing for other types."""
    if origin_of(annotation) is Literal:
        return typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(choice.value for choice in annotation)
    return ()


def literal_text(value: object) -> str:
    """Return a choice as it is written in YAML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def is_mapping(annotation: Annotation) -> bool:
    """Whether it is a mapping of free names, as in `dict[str, int]`."""
    origin = origin_of(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_union(annotation: Annotation) -> bool:
    return origin_of(annotation) is Union or origin_of(annotation) is types.UnionType


MISSING = dataclasses.MISSING
_CONFIG = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a schema, section or leaf."""

    path: tuple[str, ...]
    """Names from the root; `[]` stands for the items of a list, `<name>` for a free name."""

    annotation: Annotation
    default: object
    """Its value when it is not written; `MISSING` where it is required."""

    docstring: str
    """The first sentence."""

    @property
    def dotted(self) -> str:
        """The key as one writes it."""
        return ".".join(self.path).replace(".[]", "[]")


def check_schema(schema: type) -> None:
    """Hold a schema to the rules without which a typo would pass in silence.

    Raises:
        TypeError: a section lacks `__pydantic_config__` with `extra: forbid` and docstrings, or claims `defaults`.
    """
    if not is_section(schema):
        raise TypeError(f"a schema is a dataclass, got {schema!r}")
    if DEFAULTS_KEY in key_types(schema):
        raise TypeError(f"{schema.__name__}.{DEFAULTS_KEY}: recipes inherit through this key; rename the field")
    for section in sections(schema):
        config = getattr(section, "__pydantic_config__", {})
        if any(config.get(name) != value for name, value in _CONFIG.items()):
            raise TypeError(f"{section.__qualname__} needs __pydantic_config__ = {_CONFIG}, got {config or 'none'}")


def sections(schema: type) -> Iterator[type]:
    """Yield the schema and every section below it, each once."""
    todo, seen = [schema], {schema}
    while todo:
        section = todo.pop()
        yield section
        below = {inner for annotation in key_types(section).values() for inner in sections_in(annotation)}
        todo += below - seen
        seen |= below


def default_of(section: type, name: str) -> object:
    """Return the default of a field, made anew if a factory makes it; `MISSING` where there is none."""
    field = section.__dataclass_fields__[name]  # type: ignore[attr-defined]  # every dataclass has it
    return field.default_factory() if field.default_factory is not MISSING else field.default


def keys(schema: type, *, default: object = MISSING) -> Iterator[Key]:
    """Yield every key below a section, depth first; `default` is the value of the section when nobody writes it."""
    return _keys(schema, default, prefix=(), inside=())


def _keys(section: type, instance: object, *, prefix: tuple[str, ...], inside: tuple[type, ...]) -> Iterator[Key]:
    described = docstrings(section)
    for name, annotation in key_types(section).items():
        path = (*prefix, name)
        default = default_of(section, name) if instance is MISSING else getattr(instance, name)
        yield Key(path=path, annotation=annotation, default=default, docstring=described.get(name, ""))
        for below, steps in _sections_with_steps(annotation):
            if below not in (*inside, section):
                start = default if not steps and type(default) is below else MISSING
                yield from _keys(below, start, prefix=(*path, *steps), inside=(*inside, section))


def _sections_with_steps(annotation: Annotation) -> Iterator[tuple[type, tuple[str, ...]]]:
    for member in members(annotation):
        if is_section(member):
            yield member, ()
        for argument in typing.get_args(member):
            if sections_in(argument):
                step = "<name>" if is_mapping(member) else "[]"
                yield from ((below, (step, *steps)) for below, steps in _sections_with_steps(argument))


def docstrings(section: type) -> dict[str, str]:
    """Return the first sentence under each field that has one."""
    return {name: first_sentence(text) for name, text in descriptions(section).items()}


@functools.cache
def descriptions(section: type) -> dict[str, str]:
    """Return the docstring under each field that has one, or that of its section.

    Pydantic knows those of a class, and not of its bases.
    """
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if is_section(owner):
            found |= _own_descriptions(owner)
    return found


def _own_descriptions(section: type) -> dict[str, str]:
    described = TypeAdapter(section).json_schema()
    definitions = described.get("$defs", {})
    if "$ref" in described:
        described = _referred(described, definitions)
    found = {}
    for name, key in described.get("properties", {}).items():
        # Pydantic leaves out the words under a key where they are those of the class that the key is a section of.
        text = key.get("description") or ("$ref" in key and _referred(key, definitions).get("description"))
        if text:
            found[name] = text
    return found


def _referred(described: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    referred: dict[str, Any] = definitions[described["$ref"].rpartition("/")[2]]
    return referred


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring on one line."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", " ".join(text.split()), maxsplit=1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A key that was written under another name."""

    written: str
    """As it was written, dotted."""

    key: str
    """Its own name, dotted."""

    where: Origin
    """Where it was written."""

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.written} ({self.where}) is another name of {self.key}"


class Names:
    """Gives keys their own names; remembers which it renamed, and which were written twice."""

    def __init__(self, schema: type) -> None:
        self._schema = schema
        self.renamed: list[Renamed] = []
        self.problems: list[Problem] = []

    def own(self, node: Node) -> Node:
        """Return `node` with every key under its own name."""
        return self._own(node, self._schema, ())

    def _own(self, node: Node, section: type, path: KeyPath) -> Node:
        if not isinstance(node.value, Mapping):
            return node
        aliases, types = aliases_of(section), key_types(section)
        children: dict[str, Node] = {}
        for written, child in node.value.items():
            name = aliases.get(written, written)
            if name != written:
                self._note(written, name, path=path, where=child.key, is_double=name in node.value)
            below = only_section(types[name]) if name in types else None
            children[name] = child if below is None else self._own(child, below, (*path, name))
        return replace(node, value=children)

    def _note(self, written: str, name: str, *, path: KeyPath, where: Origin, is_double: bool) -> None:
        other, key = dotted((*path, written)), dotted((*path, name))
        if is_double:
            message, hint = f"{other} is another name of {key}, and both are written", "keep one of them"
            self.problems.append(Problem(key=other, where=where, message=message, hint=hint))
        self.renamed.append(Renamed(written=other, key=key, where=where))


def aliases_of(section: type) -> Mapping[str, str]:
    """Return other name -> own name of the keys of a section."""
    declared: Mapping[str, str] = getattr(section, "__aliases__", {})
    return declared


def to_plain(value: object) -> object:
    """Return a configured value as plain data; of a section, the fields that its constructor takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in key_types(type(value))}
    if isinstance(value, Mapping):
        return {str(to_jsonable_python(name)): to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return to_jsonable_python(value)


def lay_defaults(annotation: Annotation, node: Node, *, default: object = MISSING) -> Node:
    """Return `node` with the keys that `default`, and every section default below it, would have given.

    Lists and free mappings are replaced whole by what is written, hence get nothing from `default`; so is a key that
    may be one of several sections.
    """
    section = only_section(annotation)
    if section is not None and isinstance(node.value, Mapping):
        return _under_section(section, node, default if type(default) is section else MISSING)
    return _under_items(annotation, node)


def _under_section(section: type, node: Node, default: object) -> Node:
    written = {str(name): child for name, child in node.children()}
    children = dict(written)
    for name, annotation in key_types(section).items():
        own = default_of(section, name) if default is MISSING else getattr(default, name)
        if name in written:
            children[name] = lay_defaults(annotation, written[name], default=own)
        elif default is not MISSING:
            children[name] = default_node(to_plain(own))
    return dataclasses.replace(node, value=children)


def _under_items(annotation: Annotation, node: Node) -> Node:
    holders = [member for member in members(annotation) if typing.get_args(member) and not is_section(member)]
    if len(holders) != 1 or isinstance(node.value, str):
        return node
    children = {name: lay_defaults(item(holders[0], name), child) for name, child in node.children()}
    if isinstance(node.value, Mapping):
        return dataclasses.replace(node, value={str(name): child for name, child in children.items()})
    return dataclasses.replace(node, value=list(children.values())) if isinstance(node.value, list) else node


_DEFAULTS_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "Recipes to start from, relative to this file; the later ones win.",
}


def reference(schema: type) -> str:
    """Return a markdown table of every key: dotted key, type, default, first sentence of its docstring."""
    check_schema(schema)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [_row(key) for key in keys(schema)]
    return "\n".join(lines) + "\n"


def json_schema(schema: type) -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12) by which an editor completes and checks a recipe.

    No key is required in it, since `defaults` or an override may give what a file leaves out.
    """
    check_schema(schema)
    described = TypeAdapter(schema).json_schema()
    definitions = described.get("$defs", {})
    root = definitions[described["$ref"].rpartition("/")[2]] if "$ref" in described else described
    for part in (root, *definitions.values()):
        part.pop("required", None)
    for section in sections(schema):
        part = root if section is schema else definitions[section.__name__]
        for name, text in descriptions(section).items():
            part["properties"][name].setdefault("description", text)
        for alias, name in aliases_of(section).items():
            part["properties"][alias] = {**part["properties"][name], "description": f"Another name of {name}."}
    root["properties"] = {DEFAULTS_KEY: _DEFAULTS_SCHEMA, **root.get("properties", {})}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def _row(key: Key) -> str:
    cells = (f"`{key.dotted}`", f"`{type_text(key.annotation)}`", _default(key), key.docstring)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    if key.default is MISSING:
        return "required"
    if any(is_section(member) for member in members(key.annotation)) and key.default is not None:
        return "its defaults"
    return f"`{json.dumps(to_plain(key.default), ensure_ascii=False)}`"
