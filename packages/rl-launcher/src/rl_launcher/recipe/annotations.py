"""Type annotations of schema fields, taken apart: the members of a union, the type under a key, the words for people.

A *section* is a dataclass. Knows dataclasses and typing; does not know pydantic or recipes.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, Union

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
