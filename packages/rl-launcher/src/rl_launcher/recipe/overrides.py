"""`a.b.c=value` on the command line: one more thing to merge over a recipe.

The value is YAML (`lr=1e-5`, `eval=null`, `betas=[0.9, 0.99]`); a mapping merges, a list replaces whole, and the last
of two overrides of one key wins. A key which itself holds a dot cannot be reached. Does not know which keys exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rl_launcher.recipe.composing import compose
from rl_launcher.recipe.inheritance import Prepare, as_written, merge
from rl_launcher.recipe.locations import Node, Origin
from rl_launcher.recipe.problems import Problem

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
