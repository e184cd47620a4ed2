"""The DPO stage: the policy's own answers, judged and paired, and the margin between them widened."""

from dataclasses import fields

from torch import Tensor

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
from rl_launcher.stages.starting import start_stage

__all__ = ["run"]

PARTS = ("train", "held_out")


def run(stage: DPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Make pairs, train for the stage's steps, refit; held-out pairs measure what was not trained on."""
    policy, progress = parts.policy, recorder.progress
    temperature = recipe.policy.generation.temperature
    taken = start_stage(
        "dpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        progress=progress,
        temperature=temperature,
    )
    if not taken:
        with recorder.phase("generate"):
            progress.tensors = make_examples(stage, recipe=recipe, parts=parts)
    examples, held_out = (examples_from(progress.tensors, part) for part in PARTS)
    recorder.message(f"dpo: {len(examples.tokens) // 2} pairs to train on, {len(held_out.tokens) // 2} held out")
    learning_rate = policy.learning_rate
    steps = dpo.train(
        policy=policy,
        examples=examples,
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in enumerate(steps, start=taken + 1):
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


def make_examples(stage: DPOStage, *, recipe: Recipe, parts: Parts) -> dict[str, Tensor]:
    """Pairs of this policy's answers, and it as their reference, as tensors that a resumed run finds again."""
    drawn = next(batches(parts.prompts, size=min(stage.num_prompts, len(parts.prompts)), seed=recipe.seed))
    held_out = parts.held_out[: recipe.evaluation.max_prompts_while_training]
    tensors: dict[str, Tensor] = {}
    for part, prompts in zip(PARTS, (drawn, held_out), strict=True):
        pairs = make_pairs(prompts, stage=stage, recipe=recipe, parts=parts)
        examples = dpo.with_reference(parts.policy, dpo.prepare(pairs))
        tensors |= {f"{part}/{field.name}": getattr(examples, field.name) for field in fields(examples)}
    return tensors


def examples_from(tensors: dict[str, Tensor], part: str) -> dpo.Examples:
    """One part of what `make_examples` made."""
    return dpo.Examples(**{field.name: tensors[f"{part}/{field.name}"] for field in fields(dpo.Examples)})


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
