"""`Node`: a value of a recipe that remembers where it was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rl_launcher.recipe_files.problems import DEFAULT, KeyPath, Origin

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value with the places of its key and of itself."""

    value: Scalar | dict[str, Node] | list[Node]
    origin: Origin
    """Where the value starts."""

    key: Origin
    """Where its key starts; the file for the root, the item's own place for an item of a list."""

    @property
    def where(self) -> Origin:
        """Where to point if the value is wrong: at the value if its key is on the same line, else at the key."""
        return self.origin if self.origin.line == self.key.line else self.key

    def children(self) -> Iterator[tuple[str | int, Node]]:
        """Yield the entries of a mapping or a list; nothing for a scalar."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from enumerate(self.value)

    def find(self, path: KeyPath) -> tuple[Node, bool]:
        """Return the value at `path` and True, or its deepest existing ancestor and False."""
        here = self
        for name in path:
            below = dict(here.children()).get(name)
            if below is None:
                return here, False
            here = below
        return here, True

    def plain(self) -> object:
        """Return dicts, lists and scalars, without places."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        return [child.plain() for child in self.value] if isinstance(self.value, list) else self.value

    def with_value(self, path: KeyPath, node: Node | None) -> Node:
        """Return a copy with `node` at the existing key `path`; None removes the key."""
        name = path[0]
        if not isinstance(self.value, dict) or not isinstance(name, str) or name not in self.value:
            return self
        children = dict(self.value)
        if len(path) > 1:
            children[name] = children[name].with_value(path[1:], node)
        elif node is None:
            del children[name]
        else:
            children[name] = node
        return replace(self, value=children)


def leaves(plain: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Yield what is no mapping, and empty mappings, of plain data with its path; a list is one leaf."""
    if isinstance(plain, dict) and (plain or not path):
        for name, inner in plain.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, plain


def node_of(plain: object, origin: Origin = DEFAULT) -> Node:
    """Return plain data as a value of one origin.

    Raises:
        TypeError: it holds something else than dicts, lists, tuples, texts, numbers, booleans and None.
    """
    if isinstance(plain, Mapping):
        return Node(value={str(k): node_of(v, origin) for k, v in plain.items()}, origin=origin, key=origin)
    if isinstance(plain, list | tuple):
        return Node(value=[node_of(item, origin) for item in plain], origin=origin, key=origin)
    if plain is None or isinstance(plain, str | int | float | bool):
        return Node(value=plain, origin=origin, key=origin)
    raise TypeError(f"a recipe holds plain data, got {plain!r} of type {type(plain).__name__}")


def merge(base: Node, over: Node) -> Node:
    """Return `base` with what `over` writes: mappings merge, anything else replaces."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    children = dict(base.value)
    for name, child in over.value.items():
        children[name] = merge(children[name], child) if name in children else child
    # An override of one key does not move its section.
    return replace(base if over.origin.override is not None else over, value=children)
