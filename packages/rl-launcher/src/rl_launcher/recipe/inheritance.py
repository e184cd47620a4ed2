"""`defaults:` of a recipe: the files it starts from, merged deeply.

`defaults: base.yaml`, or a list whose later files win; paths are relative to the file which names them. Mappings
merge, lists and scalars replace, `null` switches off what was there. Does not know schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rl_launcher.recipe.locations import Node
from rl_launcher.recipe.problems import Problem, RecipeError
from rl_launcher.recipe.reading import missing_file, read_file

DEFAULTS_KEY = "defaults"


Prepare = Callable[[Node], Node]
"""What is done to each file, and to each override, before it is merged with others."""


def as_written(node: Node) -> Node:
    """Prepare nothing."""
    return node


def read_recipe(path: Path, *, prepare: Prepare = as_written) -> Node:
    """Read a recipe with everything that it inherits.

    Raises:
        RecipeError: a file is missing or unreadable, or a file inherits itself; the chain of files is named.
    """
    return _read(path, chain=(), prepare=prepare)


def merge(base: Node, over: Node) -> Node:
    """Return `base` with what `over` writes: mappings merge, anything else replaces."""
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    children = dict(base.value)
    for name, child in over.value.items():
        children[name] = merge(children[name], child) if name in children else child
    place = base if over.origin.override is not None else over  # an override of one key does not move its section
    return replace(place, value=children)


def _read(path: Path, *, chain: tuple[Path, ...], prepare: Prepare) -> Node:
    chain = (*chain, path)
    written = prepare(read_file(path))
    assert isinstance(written.value, Mapping)
    own = replace(written, value={name: child for name, child in written.value.items() if name != DEFAULTS_KEY})
    declaration = written.value.get(DEFAULTS_KEY)
    if declaration is None:
        return own
    merged: Node | None = None
    for name_node in _names(declaration, chain):
        parent = path.parent / str(name_node.value)
        _check_link(parent, name_node, chain)
        inherited = _read(parent, chain=chain, prepare=prepare)
        merged = inherited if merged is None else merge(merged, inherited)
    return own if merged is None else merge(merged, own)


def _names(declaration: Node, chain: tuple[Path, ...]) -> list[Node]:
    names = list(declaration.value) if isinstance(declaration.value, list) else [declaration]
    if all(isinstance(name.value, str) and name.value for name in names):
        return names
    message = f"`defaults` names the recipes to start from, got {declaration.plain()!r}"
    raise _refusal(declaration, chain, message=message, hint="write `defaults: base.yaml` or a list of paths")


def _check_link(parent: Path, name: Node, chain: tuple[Path, ...]) -> None:
    resolved = parent.resolve()
    if resolved in [link.resolve() for link in chain]:
        message = f"recipes inherit one another in a circle: {_arrows((*chain, parent))}"
        raise _refusal(name, chain, message=message, hint="remove one of these `defaults`")
    if not resolved.is_file():
        problem = missing_file(parent, where=name.where)
        message = f"{problem.message}, inherited through {_arrows((*chain, parent))}"
        raise _refusal(name, chain, message=message, hint=problem.hint)


def _refusal(node: Node, chain: tuple[Path, ...], *, message: str, hint: str) -> RecipeError:
    return RecipeError(str(chain[0]), [Problem(key=DEFAULTS_KEY, where=node.where, message=message, hint=hint)])


def _arrows(chain: tuple[Path, ...]) -> str:
    return " → ".join(str(link) for link in chain)
