"""Our side of `against_trl.py`: the quickstart's GRPO, as `rl-launcher run` carries it out."""

from pathlib import Path

from _trl_job import Job, grpo_overrides
from _trl_turns import TURNS, Turns

from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"

if __name__ == "__main__":
    TURNS.append(Turns())
    run(load_recipe(RECIPE, schema=Recipe, overrides=grpo_overrides(Job.from_arguments())))
