"""Other names of keys: a section declares `__aliases__`, other name -> own name, and recipes may write either.

What is written under another name becomes the key itself before files are merged, so that one file may override another
whichever name each of them took. Writing both in one file is refused. Nothing is renamed in silence: see `renamed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rl_launcher.recipe.annotations import key_types, only_section
from rl_launcher.recipe.locations import KeyPath, Node, Origin, dotted
from rl_launcher.recipe.problems import Problem


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
