"""The DPO stage: the policy's own answers, judged and paired, and the margin between them widened."""

from rl_algorithms import dpo
from rl_algorithms.chat import Prompt
from rl_algorithms.data import DataError, batches
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import collect
from rl_generation import Sampling
from rl_launcher.building import Parts
from rl_launcher.evaluating import Evaluator
from rl_launcher.recipe_schema import DPOStage, Recipe
from rl_launcher.recording import Recorder

__all__ = ["run"]


def run(stage: DPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Make pairs, train for the stage's steps, refit; held-out pairs measure what was not trained on."""
    policy = parts.policy
    policy.start_training(
        stage.optimizer, num_steps=stage.max_num_steps, temperature=recipe.policy.generation.temperature
    )
    with recorder.phase("generate"):
        drawn = next(batches(parts.prompts, size=min(stage.num_prompts, len(parts.prompts)), seed=recipe.seed))
        pairs = make_pairs(drawn, stage=stage, recipe=recipe, parts=parts)
        held_out_prompts = parts.held_out[: recipe.evaluation.max_prompts_while_training]
        held_out = dpo.with_reference(
            policy, dpo.prepare(make_pairs(held_out_prompts, stage=stage, recipe=recipe, parts=parts))
        )
    recorder.message(f"dpo: {len(pairs)} pairs to train on, {len(held_out.tokens) // 2} held out")
    learning_rate = policy.learning_rate
    steps = dpo.train(policy=policy, pairs=pairs, config=stage, version=policy.version, seed=recipe.seed)
    for index, metrics in enumerate(steps, start=1):
        extra = {"learning_rate": learning_rate}
        if index == stage.max_num_steps or evaluator.due(index - 1, index):
            with recorder.phase("refit"):
                parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra["held_out_greedy"] = evaluator.quick()
                measured = dpo.margins(policy, held_out, beta=stage.beta)
                extra |= {f"held_out_{name}": value for name, value in measured.items()}
        recorder.step("dpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def make_pairs(prompts: list[Prompt], *, stage: DPOStage, recipe: Recipe, parts: Parts) -> list[dpo.Pair]:
    """Sample answers to each prompt and pair the right ones with the wrong ones.

    Raises:
        DataError: every answer to every prompt was rewarded alike, so there is nothing to prefer.
    """
    generation = recipe.policy.generation
    rollouts = collect(
        prompts,
        group_size=stage.num_generations_per_prompt,
        engine=parts.engine,
        sampling=Sampling(max_new_tokens=generation.max_new_tokens, temperature=generation.temperature),
        environment=parts.environment,
        chat=parts.chat,
        timer=PhaseTimer(),
    )
    pairs = dpo.pairs_from_rollouts(rollouts, pairs_per_prompt=stage.pairs_per_prompt)
    if not pairs:
        raise DataError(
            f"none of {len(prompts)} prompts has answers of different reward among its "
            f"{stage.num_generations_per_prompt}, so there are no pairs to prefer between; give the policy an sft "
            f"stage first, raise dpo.num_prompts or dpo.num_generations_per_prompt, or mend the reward"
        )
    return pairs
