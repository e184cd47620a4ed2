"""What a schema of dataclasses says of its keys: names, types, defaults, docstrings; and what it must declare.

A *section* is a dataclass. Knows where pydantic keeps docstrings; does not know recipes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

from rl_launcher.recipe.annotations import Annotation, is_mapping, is_section, key_types, members, sections_in
from rl_launcher.recipe.inheritance import DEFAULTS_KEY

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
