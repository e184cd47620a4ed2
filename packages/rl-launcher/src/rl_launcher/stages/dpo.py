"""The DPO stage: the policy's own answers, judged and paired, and the margin between them widened."""

from rl_algorithms import dpo
from rl_launcher.building import Parts
from rl_launcher.evaluating import Evaluator
from rl_launcher.recipe_schema import DPOStage, Recipe
from rl_launcher.recording import Recorder
from rl_launcher.stages.pairs import held_out_pairs, make_pairs, pairs_to_train_on
from rl_launcher.stages.starting import start_stage

__all__ = ["run"]


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
            progress.tensors = make_pairs(stage, recipe=recipe, parts=parts)
        recorder.check()
    examples, held_out = pairs_to_train_on(progress.tensors), held_out_pairs(progress.tensors)
    num_held_out = 0 if held_out is None else len(held_out.tokens) // 2
    recorder.message(f"dpo: {len(examples.tokens) // 2} pairs to train on, {num_held_out} held out")
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
                if held_out is not None:
                    measured = dpo.margins(policy, held_out, beta=stage.beta)
                    extra |= {f"held_out_{name}": value for name, value in measured.items()}
        recorder.step("dpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate
