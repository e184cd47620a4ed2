"""The stages of a run in their order, with the held-out prompts asked before and after the one that it is about.

sft -> held-out before -> grpo or dpo -> held-out after
"""

from rl_launcher.building import Parts
from rl_launcher.evaluating import Evaluator, HeldOut
from rl_launcher.explaining import describe_backend
from rl_launcher.progress import Progress
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import Recorder
from rl_launcher.stages import dpo, grpo, sft

__all__ = ["headline_stage", "train"]


def train(recipe: Recipe, parts: Parts, recorder: Recorder, *, progress: Progress) -> HeldOut:
    """Go through the stages, or what is left of them; return how the result does on the held-out prompts."""
    evaluator = Evaluator(parts, recipe)
    headline = headline_stage(recipe)
    progress.restore(parts)
    if not parts.selection.is_plain:
        recorder.message(describe_backend(recipe, parts.selection))
    parts.weight_sync(version=progress.version)  # proves, before training, that every weight of the engine can be fed
    if recipe.sft is not None and headline not in {"sft", progress.stage}:
        recorder.start()
        sft.run(recipe.sft, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    if progress.before is None:
        before = evaluator.both()
        progress.before = before.metrics()
        recorder.evaluation(headline, progress.before)
        recorder.message(f"held out before {headline}: {before.describe()}")
        recorder.log.write_samples(evaluator.samples(before, stage=headline, when="before"))
        recorder.check()
    recorder.start()
    version_before = parts.policy.version - progress.steps_of(headline)
    if recipe.grpo is not None:
        grpo.run(recipe.grpo, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    elif recipe.dpo is not None:
        dpo.run(recipe.dpo, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    elif recipe.sft is not None:
        sft.run(recipe.sft, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    after = evaluator.both()
    recorder.message(f"held out after {headline}: {after.describe()}")
    recorder.log.write_samples(evaluator.samples(after, stage=headline, when="after"))
    if recipe.grpo is not None and parts.policy.version == version_before:
        recorder.message(
            "grpo took no step: in no group of any batch did the rewards differ, so the weights are unchanged. The "
            "policy must earn a reward now and then: start from one that can, keep sft, or look at env.reward"
        )
    if parts.environment.errors:
        recorder.message(f"{parts.environment.errors} answers could not be judged and counted as 0 (env.on_error=zero)")
    return after


def headline_stage(recipe: Recipe) -> str:
    """The stage that the run is about: before and after mean before and after this one."""
    return "grpo" if recipe.grpo is not None else "dpo" if recipe.dpo is not None else "sft"
