"""Recipes: YAML files, inheritance and overrides, read into a schema of dataclasses with the origin of every value.

Generic over the schema; knows nothing of policies, engines or loops. Needs PyYAML and pydantic.
"""

from rl_launcher.recipe_files.dataclass_schema import json_schema, reference
from rl_launcher.recipe_files.import_string import ImportStringError, imported_digest, load_object
from rl_launcher.recipe_files.load import Resolved, load_recipe, resolve_path
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
    "resolve_path",
]
