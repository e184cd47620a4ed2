"""A recipe file, without what it inherits.

Knows files; does not know schemas, inheritance or which keys exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl_launcher.recipe.composing import compose
from rl_launcher.recipe.locations import Node, Origin
from rl_launcher.recipe.problems import Problem, RecipeError, nearest
from rl_launcher.recipe.yaml_dialect import split_lines


def read_file(path: Path) -> Node:
    """Read one recipe file, without what it inherits.

    Raises:
        RecipeError: the file is missing, empty, not a mapping or not YAML of this dialect.
    """
    text = _text(path)
    lines = split_lines(text)

    def at(line: int, column: int) -> Origin:
        source = lines[line] if line < len(lines) else ""
        return Origin(file=path, line=line + 1, column=column + 1, source=source)

    root, problems = compose(text, at)
    if root is not None and isinstance(root.value, Mapping) and not problems:
        return replace(root, key=Origin(file=path))
    raise RecipeError(str(path), problems or [_not_a_mapping(root, path)])


def missing_file(path: Path, *, where: Origin) -> Problem:
    """Return the problem of a recipe file that is not there, naming those like it."""
    beside = sorted(str(other) for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    like = nearest(str(path), beside, cutoff=0.7)
    hint = f"did you mean {like[0]}?" if like else f"looked in {path.parent.absolute()}"
    return Problem(key="", where=where, message=f"there is no file {path}", hint=hint)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(str(path), [missing_file(path, where=Origin(file=path))]) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        hint = "save the file as UTF-8"
    except OSError as error:
        message, hint = f"cannot be read: {error.strerror}", "give the path of a YAML file"
    raise RecipeError(str(path), [Problem(key="", where=Origin(file=path), message=message, hint=hint)])


def _not_a_mapping(root: Node | None, path: Path) -> Problem:
    hint = "write `key: value` lines"
    if root is None:
        return Problem(key="", where=Origin(file=path), message="the file is empty", hint=hint)
    kind = "a list" if isinstance(root.value, list) else "a single value"
    message = f"a recipe is a mapping of keys to values, this file holds {kind}"
    return Problem(key="", where=root.origin, message=message, hint=hint)
