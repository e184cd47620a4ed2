"""Recipes: YAML files, inheritance and overrides, read into a schema of dataclasses with the origin of every value.

Generic over the schema; knows nothing of policies, engines or loops. Needs PyYAML and pydantic.
"""

from rl_launcher.recipe.importing import ImportStringError, imported_digest, load_object
from rl_launcher.recipe.loading import load_recipe, resolve_path
from rl_launcher.recipe.locations import Origin
from rl_launcher.recipe.problems import Problem, RecipeError
from rl_launcher.recipe.reference import json_schema, reference
from rl_launcher.recipe.resolved import Resolved

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
