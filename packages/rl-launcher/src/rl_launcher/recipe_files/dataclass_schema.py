"""What a dataclass schema says about its keys: names, types, defaults and docstrings; reference page and JSON schema.

A *section* is a dataclass. A key is a section, a section or null, sections by names of the user's, or plain data
(scalars, lists and mappings of them).
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, Union

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from rl_launcher.recipe_files.nodes import Node, node_of
from rl_launcher.recipe_files.problems import KeyPath, Problem, dotted

Annotation = Any  # what stands after the colon of a field: a class, a union, `list[int]`, …
MISSING = dataclasses.MISSING
DEFAULTS_KEY = "defaults"
STRICT: dict[str, object] = {"extra": "forbid"}
"""`__pydantic_config__` of every section."""


def check_schema(schema: type) -> None:
    """Refuse a schema in which a typo would pass unnoticed.

    Raises:
        TypeError: a section lacks `__pydantic_config__` with `extra: forbid`, or has a key `defaults`,
            or keeps sections in a list or a union with anything but null.
    """
    if not is_section(schema):
        raise TypeError(f"a schema is a dataclass, got {schema!r}")
    if DEFAULTS_KEY in key_types(schema):
        raise TypeError(f"{schema.__name__}.{DEFAULTS_KEY}: recipes inherit through this key; rename the field")
    for section in sections(schema):
        config = getattr(section, "__pydantic_config__", {})
        if any(config.get(name) != value for name, value in STRICT.items()):
            raise TypeError(f"{section.__qualname__} needs __pydantic_config__ = {STRICT}, got {config or 'none'}")
        for name, annotation in key_types(section).items():
            below = section_of(annotation) or named_section_of(annotation)
            if below is None and _holds_a_section(annotation):
                raise TypeError(
                    f"{section.__qualname__}.{name}: a key holds one section, a section or null, or dict[str, section]"
                )


def sections(schema: type) -> Iterator[type]:
    """Yield the schema and every section below it, each once."""
    todo, seen = [schema], {schema}
    while todo:
        yield (section := todo.pop())
        types = key_types(section).values()
        below = {inner for each in types if (inner := section_of(each) or named_section_of(each))}
        todo += below - seen
        seen |= below


# -- Types ------------------------------------------------------------------------------------------


def origin_of(annotation: Annotation) -> Annotation:
    """Return `list` for `list[int]`, `Union` for a union, None for a plain class."""
    return typing.get_origin(annotation)  # whose own type makes mypy refuse comparisons with classes


def is_section(annotation: Annotation) -> bool:
    """Whether it is a dataclass."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


@functools.cache
def key_types(section: type) -> dict[str, Annotation]:
    """Return the keys of a section with their types: the fields that its constructor takes."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section) if field.init}


def members(annotation: Annotation) -> list[Annotation]:
    """Return what a type may be apart from null: one entry, or the members of a union."""
    if _is_union(annotation):
        return [member for choice in typing.get_args(annotation) for member in members(choice)]
    return [] if annotation is type(None) else [annotation]


def section_of(annotation: Annotation) -> type | None:
    """Return the section of a type `Section` or `Section | None`; None for any other type."""
    found = members(annotation)
    return found[0] if len(found) == 1 and is_section(found[0]) else None


def named_section_of(annotation: Annotation) -> type | None:
    """Return the section of a type `dict[str, Section]`; None for any other type."""
    arguments = typing.get_args(annotation)
    is_named = origin_of(annotation) is dict and arguments[0] is str and is_section(arguments[1])
    return arguments[1] if is_named else None


def item(annotation: Annotation, name: str | int) -> Annotation:
    """Return the type of what lies under `name` in a value of this type; Any if it is unknown."""
    arguments = typing.get_args(annotation)
    if is_section(annotation):
        return key_types(annotation).get(str(name), Any)
    if not arguments:
        return Any
    if origin_of(annotation) is tuple and arguments[-1] is not Ellipsis:
        return arguments[name] if isinstance(name, int) and name < len(arguments) else Any
    return arguments[-1] if isinstance(name, str) else arguments[0]


def choices_of(annotation: Annotation) -> tuple[object, ...]:
    """Return the values that a Literal or an Enum admits; nothing for other types."""
    if origin_of(annotation) is Literal:
        return typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(choice.value for choice in annotation)
    return ()


def type_text(annotation: Annotation) -> str:
    """Return a type in the terms of YAML: `int | null`, `"dpo" | "grpo"`, `list[str]`, `section`."""
    if _is_union(annotation):
        data = [each for each in typing.get_args(annotation) if origin_of(each) is not collections.abc.Callable]
        return " | ".join(dict.fromkeys(type_text(member) for member in data))  # no recipe can hold a function
    if choices := choices_of(annotation):
        return " | ".join(json.dumps(choice, ensure_ascii=False, default=str) for choice in choices)
    if is_section(annotation):
        return "section"
    special: dict[Annotation, str] = {type(None): "null", Any: "any value", Ellipsis: "..."}
    name = getattr(origin_of(annotation) or annotation, "__name__", str(annotation)).replace("Path", "path")
    arguments = ", ".join(type_text(argument) for argument in typing.get_args(annotation))
    return special.get(annotation) or (f"{name}[{arguments}]" if arguments else name)


def _is_union(annotation: Annotation) -> bool:
    return origin_of(annotation) in {Union, types.UnionType}


def _holds_a_section(annotation: Annotation) -> bool:
    return is_section(annotation) or any(_holds_a_section(argument) for argument in typing.get_args(annotation))


# -- Keys and docstrings ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a schema, section or leaf."""

    dotted: str
    """The key in full."""

    annotation: Annotation
    default: object
    """Its value if it is not written; `MISSING` if it is required."""

    docstring: str
    """The first sentence."""


def keys(
    section: type, *, instance: object = MISSING, prefix: str = "", inside: tuple[type, ...] = ()
) -> Iterator[Key]:
    """Yield every key below a section, depth first. Defaults are those of `instance`, if it is given."""
    described = docstrings(section)
    for name, annotation in key_types(section).items():
        default = default_of(section, name) if instance is MISSING else getattr(instance, name)
        yield Key(dotted=prefix + name, annotation=annotation, default=default, docstring=described.get(name, ""))
        below = section_of(annotation)
        if below is not None and below not in (*inside, section):
            start = default if type(default) is below else MISSING
            yield from keys(below, instance=start, prefix=f"{prefix}{name}.", inside=(*inside, section))
        if (named := named_section_of(annotation)) is not None:
            yield from keys(named, prefix=f"{prefix}{name}.NAME.", inside=(*inside, section))


def default_of(section: type, name: str) -> object:
    """Return the default of a field, calling its factory if it has one; `MISSING` if there is none."""
    field = section.__dataclass_fields__[name]  # type: ignore[attr-defined]  # every dataclass has it
    return field.default_factory() if field.default_factory is not MISSING else field.default


def docstrings(section: type) -> dict[str, str]:
    """Return the first sentence under each field that has a docstring."""
    sentence_end = r"(?<=[.!?])\s+(?=[A-Z`\"(])"
    return {name: re.split(sentence_end, " ".join(text.split()))[0] for name, text in descriptions(section).items()}


@functools.cache
def descriptions(section: type) -> dict[str, str]:
    """Return the docstring under each field of a section and of the sections it derives from."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if not is_section(owner):
            continue
        names = key_types(owner)
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in itertools.pairwise(statements):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    if name in names:
                        found[name] = inspect.cleandoc(words)
    return found


# -- Recipes and their schema -----------------------------------------------------------------------


def own_names(node: Node, section: type, *, problems: list[Problem], notes: list[str], path: KeyPath = ()) -> Node:
    """Return `node` with the aliases that sections declare in `__aliases__` replaced by the keys' own names.

    Each replacement adds a note; a key that is written under both names adds a problem.
    """
    if not isinstance(node.value, dict):
        return node
    aliases: Mapping[str, str] = getattr(section, "__aliases__", {})
    children: dict[str, Node] = {}
    for written, child in node.value.items():
        name = aliases.get(written, written)
        if name != written:
            text = f"{dotted((*path, written))} is another name of {dotted((*path, name))}"
            if name in node.value:
                message, key = f"{text}, and both are written", dotted((*path, written))
                problems.append(Problem(key=key, where=child.key, message=message, hint="keep one of them"))
            notes.append(f"{dotted((*path, written))} ({child.key}) is another name of {dotted((*path, name))}")
        below = section_of(key_types(section).get(name, Any))
        children[name] = own_names(child, below, problems=problems, notes=notes, path=(*path, name)) if below else child
    return replace(node, value=children)


def lay_defaults(section: type, node: Node, *, default: object = MISSING) -> Node:
    """Return `node` with the keys that the default of its own section gives.

    With `optimizer: Adam = Adam(lr=3e-4)`, a recipe that writes only `optimizer.eps` keeps `lr` at 3e-4, and does not
    get the default of the class.
    """
    if not isinstance(node.value, dict):
        return node
    children = dict(node.value)
    for name, annotation in key_types(section).items():
        own = default_of(section, name) if default is MISSING else getattr(default, name)
        below = section_of(annotation)
        if name not in children and default is not MISSING:
            children[name] = node_of(to_plain(own))
        elif name in children and below is not None:
            children[name] = lay_defaults(below, children[name], default=own if type(own) is below else MISSING)
    return replace(node, value=children)


def to_plain(value: object) -> object:
    """Return a configured value as plain data; of a section, the fields that its constructor takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in key_types(type(value))}
    if isinstance(value, Mapping):
        return {str(to_jsonable_python(name)): to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    return to_jsonable_python(value)


def reference(schema: type) -> str:
    """Return a markdown table of every key: dotted key, type, default, first sentence of its docstring."""
    check_schema(schema)
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys(schema):
        if key.default is MISSING:
            default = "required"
        elif section_of(key.annotation) is not None and key.default is not None:
            default = "its defaults"
        else:
            default = f"`{json.dumps(to_plain(key.default), ensure_ascii=False)}`"
        cells = (f"`{key.dotted}`", f"`{type_text(key.annotation)}`", default, key.docstring)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


class _DataOnly(GenerateJsonSchema):
    """Leaves functions, which Python may give and a recipe cannot hold, out of unions without a warning."""

    ignored_warning_kinds = {"skipped-choice"}  # noqa: RUF012 - pydantic declares it so


def json_schema(schema: type) -> dict[str, Any]:
    """Return a JSON schema (draft 2020-12) by which an editor completes and checks a recipe.

    It requires no key, since `defaults` or an override may give what a file leaves out.
    """
    check_schema(schema)
    described = TypeAdapter(schema).json_schema(schema_generator=_DataOnly)
    definitions = described.get("$defs", {})
    root = definitions[described["$ref"].rpartition("/")[2]] if "$ref" in described else described
    for part in (root, *definitions.values()):
        part.pop("required", None)
    for section in sections(schema):
        properties = (root if section is schema else definitions[section.__name__])["properties"]
        for name, text in descriptions(section).items():
            properties[name].setdefault("description", text)
        for alias, name in getattr(section, "__aliases__", {}).items():
            properties[alias] = {**properties[name], "description": f"Another name of {name}."}
        for name, text in getattr(schema, "expanded_keys", {}).get(section, {}).items():
            properties.setdefault(name, {"description": text})
    defaults = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
        "description": "Recipes to start from, relative to this file, or shipped recipes; the later ones win.",
    }
    root["properties"] = {DEFAULTS_KEY: defaults, **root.get("properties", {})}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
