"""Between configured dataclasses and plain data: dicts, lists, numbers, texts.

Also lays a section's own defaults under a partly written section: with `optimizer: Adam = Adam(lr=3e-4)` a recipe
which writes only `optimizer.eps` keeps `lr` at 3e-4, and not at the default of the class. Knows nothing of files.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping

from pydantic_core import to_jsonable_python

from rl_launcher.recipe.annotations import Annotation, is_section, item, key_types, members, only_section
from rl_launcher.recipe.locations import Node, default_node
from rl_launcher.recipe.schema import MISSING, default_of


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
