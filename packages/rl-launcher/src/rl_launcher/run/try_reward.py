"""Try the reward or environment of a recipe on a few rollouts before training; `rl_algorithms.reward_trial` does it."""

import tempfile
from dataclasses import replace
from pathlib import Path

from rl_algorithms import reward_trial
from rl_algorithms.reward_trial import TrialResult
from rl_launcher.build.build import build
from rl_launcher.checks import preflight
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import Resolved
from rl_launcher.run.evaluate import turn_limits
from rl_launcher.schema import HOW_TO_JUDGE, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects


def try_reward(
    resolved: Resolved[Recipe], *, objects: Objects = NO_OBJECTS, prompts: int = 2, rollouts: int = 4
) -> TrialResult:
    """Sample `rollouts` responses to each of the first `prompts` training prompts with the untrained policy.

    Raises:
        Refusal: the recipe has no `env`, or fewer prompts or rollouts than 1 and 2 are requested; or whatever a part
            refuses. What the reward raises is raised as it is in a run.
    """
    recipe = resolved.value
    if recipe.env is None and objects.reward is None and objects.environment is None:
        raise Refusal(f"try-reward scores responses, and the recipe has no env; {HOW_TO_JUDGE}")
    if prompts < 1 or rollouts < 2:  # before a model is loaded
        raise Refusal(f"prompts={prompts} must be >= 1 and rollouts={rollouts} >= 2: a group of one has no advantage")
    preflight.check(recipe, new_run=False)
    with tempfile.TemporaryDirectory(prefix="rl-launcher-try-reward-") as folder:
        parts = build(replace(recipe, run_dir=folder), run_dir=Path(folder), objects=objects)
        try:
            parts.weight_sync(version=0)
            return reward_trial.try_reward(
                parts.data.prompts[:prompts],
                engine=parts.engine,
                sampling=recipe.policy.generation.sampling(),
                environment=parts.environment,
                chat=parts.data.chat,
                group_size=rollouts,
                advantage=None if recipe.grpo is None else recipe.grpo.objective.advantage,
                seed=recipe.seed,
                greedy=recipe.policy.generation.sampling(greedy=True),
                **turn_limits(recipe),
            )
        finally:
            parts.close()
