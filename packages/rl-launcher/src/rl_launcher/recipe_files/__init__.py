"""Recipes: YAML files or dicts with inheritance and overrides, read into dataclasses with the origin of every value.

`load_recipe` is the way in; `load_object` imports what a recipe names as `file.py:name`.
"""

from rl_launcher.recipe_files.dataclass_schema import json_schema, reference
from rl_launcher.recipe_files.import_string import ImportStringError, imported_digest, load_object
from rl_launcher.recipe_files.load import Resolved, load_recipe
from rl_launcher.recipe_files.problems import Origin, Problem, RecipeError

__all__ = [
    "ImportStringError",
    "Origin",
    "Problem",
    "RecipeError",
    "Resolved",
    "imported_digest",
    "json_schema",
    "load_object",
    "load_recipe",
    "reference",
]
