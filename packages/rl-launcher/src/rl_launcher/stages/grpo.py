"""The GRPO stage: prompts, rollouts, rewards, steps, refit; the loop itself is `rl_algorithms.grpo.train`."""

from itertools import islice

from rl_algorithms import grpo
from rl_algorithms.data import batches
from rl_launcher.building import Parts, sampling
from rl_launcher.evaluating import Evaluator
from rl_launcher.recipe_schema import GRPOStage, Recipe
from rl_launcher.recording import Recorder
from rl_launcher.stages.starting import start_stage

__all__ = ["run"]


def run(stage: GRPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps; the engine holds the policy's weights before, between and after."""
    policy, generation = parts.policy, recipe.policy.generation
    taken = start_stage(
        "grpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        progress=recorder.progress,
        temperature=generation.temperature,
    )
    learning_rate, batches_taken = policy.learning_rate, taken // stage.steps_per_generation
    for metrics in grpo.train(
        policy=policy,
        engine=parts.engine,
        weight_sync=parts.weight_sync,
        environment=parts.environment,
        prompts=islice(batches(parts.prompts, size=stage.num_prompts, seed=recipe.seed), batches_taken, None),
        chat=parts.chat,
        sampling=sampling(generation),
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    ):
        previous, taken = taken, taken + stage.steps_per_generation
        extra = {"learning_rate": learning_rate, **parts.weight_sync.metrics()}
        if evaluator.due(previous, taken):
            with recorder.phase("evaluate"):
                extra["held_out_greedy"] = evaluator.quick()
        recorder.step("grpo", taken, {**metrics, **extra})
        learning_rate = policy.learning_rate
