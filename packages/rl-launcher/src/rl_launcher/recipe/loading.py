"""`load_recipe`: a YAML file and overrides, as a configured dataclass.

    files and what they inherit -> overrides -> ${env:…} -> the schema

Other names of keys, which a section of the schema may declare, become its own in each file, before merging.

Generic over the schema: knows no key by name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rl_launcher.recipe.aliases import Names
from rl_launcher.recipe.inheritance import read_recipe
from rl_launcher.recipe.interpolation import interpolate
from rl_launcher.recipe.overrides import override
from rl_launcher.recipe.problems import RecipeError
from rl_launcher.recipe.resolved import Resolved, resolve
from rl_launcher.recipe.schema import check_schema
from rl_launcher.recipe.validation import reading_order, validate

T = TypeVar("T")


def load_recipe(path: str | Path, *, schema: type[T], overrides: Sequence[str] = ()) -> Resolved[T]:
    """Read a recipe with what it inherits, apply `overrides` (`a.b.c=value`) in order and validate.

    Raises:
        RecipeError: with every problem that could be found; `problems` are data, `str()` is one screen of text.
        TypeError: `schema` breaks the rules of schemas (a fault of the program, not of the recipe).
    """
    check_schema(schema)
    names = Names(schema)
    recipe, problems = override(read_recipe(Path(path), prepare=names.own), overrides, prepare=names.own)
    problems += names.problems
    recipe, found = interpolate(recipe, environment=os.environ)
    value, invalid = validate(recipe, schema)
    blamed = {problem.key for problem in found}
    problems += sorted([*found, *(wrong for wrong in invalid if wrong.key not in blamed)], key=reading_order)
    if problems or value is None:
        raise RecipeError(str(path), problems)
    return resolve(value, recipe, renamed=tuple(names.renamed))


def resolve_path(value: str | Path, base: Path | None = None) -> Path:
    """Return the absolute path that a value of a recipe means.

    Relative paths are relative to the current directory, as in a shell, and not to the file that holds them: one
    recipe serves many directories. `~` is the home directory. `base` stands in for the current directory.
    """
    return (base or Path.cwd()).absolute() / Path(value).expanduser()
