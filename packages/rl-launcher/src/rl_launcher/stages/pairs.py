"""Preference pairs of the policy's own answers, right and wrong, as tensors that a resumed run finds again."""

from dataclasses import fields

from torch import Tensor

from rl_algorithms import dpo
from rl_algorithms.chat import Prompt
from rl_algorithms.data import DataError, batches
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import collect
from rl_launcher.building import Parts, sampling
from rl_launcher.recipe_schema import DPOStage, Recipe

__all__ = ["held_out_pairs", "make_pairs", "pairs_to_train_on"]

TRAIN, HELD_OUT = "train/", "held_out/"


def make_pairs(stage: DPOStage, *, recipe: Recipe, parts: Parts) -> dict[str, Tensor]:
    """Sample and pair answers to training prompts and to held-out ones; the policy as it is now is the reference.

    Raises:
        DataError: every answer to every training prompt was rewarded alike, so there is nothing to prefer.
    """
    drawn = next(batches(parts.prompts, size=min(stage.num_prompts, len(parts.prompts)), seed=recipe.seed))
    pairs = _sample(drawn, stage, recipe=recipe, parts=parts)
    if not pairs:
        raise DataError(
            f"none of {len(drawn)} prompts has answers of different reward among its "
            f"{stage.num_generations_per_prompt}, so there are no pairs to prefer between; give the policy an sft "
            f"stage first, raise dpo.num_prompts or dpo.num_generations_per_prompt, or mend the reward"
        )
    held_out = _sample(
        parts.held_out[: recipe.evaluation.max_prompts_while_training], stage, recipe=recipe, parts=parts
    )
    return _tensors(TRAIN, pairs, parts) | (_tensors(HELD_OUT, held_out, parts) if held_out else {})


def pairs_to_train_on(tensors: dict[str, Tensor]) -> dpo.Examples:
    """Those of the training prompts."""
    return dpo.Examples(**{field.name: tensors[TRAIN + field.name] for field in fields(dpo.Examples)})


def held_out_pairs(tensors: dict[str, Tensor]) -> dpo.Examples | None:
    """Those of the held-out prompts; None where all their answers were rewarded alike."""
    if not any(name.startswith(HELD_OUT) for name in tensors):
        return None
    return dpo.Examples(**{field.name: tensors[HELD_OUT + field.name] for field in fields(dpo.Examples)})


def _sample(prompts: list[Prompt], stage: DPOStage, *, recipe: Recipe, parts: Parts) -> list[dpo.Pair]:
    rollouts = collect(
        prompts,
        group_size=stage.num_generations_per_prompt,
        engine=parts.engine,
        sampling=sampling(recipe.policy.generation),
        environment=parts.environment,
        chat=parts.chat,
        timer=PhaseTimer(),
    )
    return dpo.pairs_from_rollouts(rollouts, pairs_per_prompt=stage.pairs_per_prompt)


def _tensors(part: str, pairs: list[dpo.Pair], parts: Parts) -> dict[str, Tensor]:
    examples = dpo.with_reference(parts.policy, dpo.prepare(pairs))
    return {part + field.name: getattr(examples, field.name) for field in fields(examples)}
