"""`${env:NAME}` and `${env:NAME:default}` inside the texts of a recipe.

The result is always text: a variable that holds `3` does not become a number. `$${` stands for a literal `${`; any
other `${` is refused. Done after merging, so that a variable is not asked for where its value is replaced. Keys are
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from rl_launcher.recipe.locations import KeyPath, Node, dotted
from rl_launcher.recipe.problems import Problem

_REFERENCE = re.compile(
    r"(?P<escaped>\$\$\{)|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<default>[^{}]*))?\}|(?P<wrong>\$\{[^}]*\}?)"
)
_FORMS = "write ${env:NAME} or ${env:NAME:default}; $${ for a literal ${"


def interpolate(node: Node, *, environment: Mapping[str, str], path: KeyPath = ()) -> tuple[Node, list[Problem]]:
    """Return `node` with every reference replaced, and a problem for each that cannot be; those stay as they are."""
    if isinstance(node.value, str):
        return _text(node, node.value, environment=environment, path=path)
    problems: list[Problem] = []
    children: dict[str | int, Node] = {}
    for name, child in node.children():
        children[name], found = interpolate(child, environment=environment, path=(*path, name))
        problems += found
    if isinstance(node.value, Mapping):
        return replace(node, value={str(name): child for name, child in children.items()}), problems
    return (replace(node, value=list(children.values())) if isinstance(node.value, list) else node), problems


def escape(plain: object) -> object:
    """Return plain data whose texts survive `interpolate` unchanged."""
    if isinstance(plain, str):
        return plain.replace("${", "$${")
    if isinstance(plain, Mapping):
        return {name: escape(value) for name, value in plain.items()}
    return [escape(item) for item in plain] if isinstance(plain, list) else plain


def _text(node: Node, text: str, *, environment: Mapping[str, str], path: KeyPath) -> tuple[Node, list[Problem]]:
    problems: list[Problem] = []

    def refuse(message: str, hint: str) -> None:
        problems.append(Problem(key=dotted(path), where=node.where, message=message, hint=hint))

    def replacement(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match["escaped"]:
            return "${"
        if match["wrong"]:
            refuse(f"{match['wrong']} is not a reference", _FORMS)
            return match[0]
        if name not in environment and default is None:
            refuse(f"environment variable {name} is not set", f"export {name}=… or write ${{env:{name}:default}}")
            return match[0]
        return str(environment.get(name, default))

    replaced = _REFERENCE.sub(replacement, text)
    return (node if problems else replace(node, value=replaced)), problems
