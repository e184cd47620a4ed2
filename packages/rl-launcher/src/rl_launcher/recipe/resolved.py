"""A recipe once read: the configured value, and where each part of it comes from.

Does not know how recipes are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from rl_launcher.recipe.aliases import Renamed
from rl_launcher.recipe.interpolation import escape
from rl_launcher.recipe.locations import DEFAULT, KeyPath, Node, Origin, dotted
from rl_launcher.recipe.plain_data import to_plain
from rl_launcher.recipe.problems import shorten
from rl_launcher.recipe.yaml_dialect import dump

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
