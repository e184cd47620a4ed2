"""The stages of a run in their order, and what was held out, asked or read before and after the one that it is about.

sft -> held-out before -> grpo, dpo or distill -> held-out after
"""

from rl_launcher.checkpoints.disk import STATE_PER_WEIGHT, check_space
from rl_launcher.checks.explain import describe_backend
from rl_launcher.run.evaluate import Evaluator, Outcome
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages import run_stage
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory

__all__ = ["train"]


def train(recipe: Recipe, parts: Parts, recorder: Recorder, *, directory: RunDirectory) -> Outcome:
    """Go through the stages, or what is left of them; return how the result does on what was held out."""
    evaluator, progress, headline = Evaluator(parts, recipe), recorder.progress, recipe.headline
    progress.restore(parts)
    _introduce(recipe, parts, recorder)
    report = parts.weight_sync(version=progress.version)  # proves that every weight of the engine can be fed
    whole = parts.selection.adapters is None  # else nearly all of a checkpoint are frozen weights
    check_space(
        directory.path,
        checkpoint_bytes=report.bytes * (STATE_PER_WEIGHT if whole else 1),
        model_bytes=report.bytes,
        config=recipe.checkpointing,
    )
    for name in recipe.stages:
        if headline not in {name, progress.stage}:
            recorder.start()
            run_stage(name, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    if progress.before is None:
        before = evaluator.outcome()
        progress.before = before.metrics()
        if progress.before:
            recorder.evaluation(headline, progress.before)
            recorder.message(f"held out before {headline}: {before.describe()}")
        recorder.write_samples(evaluator.samples(before, stage=headline, when="before"))
        recorder.check()
    recorder.start()
    version_before = parts.policy.version - progress.steps_of(headline)
    run_stage(headline, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
    after = evaluator.outcome()
    if after.metrics():
        recorder.message(f"held out after {headline}: {after.describe()}")
    recorder.write_samples(evaluator.samples(after, stage=headline, when="after"))
    _conclude(recipe, parts, recorder, untrained=parts.policy.version == version_before)
    return after


def _introduce(recipe: Recipe, parts: Parts, recorder: Recorder) -> None:
    if not parts.selection.is_plain:
        recorder.message(describe_backend(recipe, parts.selection))
    if parts.skipped.count:
        recorder.message(f"data.on_bad_row=skip: {parts.skipped}")
    if parts.unasked:
        recorder.message(
            f"{parts.unasked} held-out prompts leave no room for an answer of policy.generation.max_new_tokens="
            f"{recipe.policy.generation.max_new_tokens}, and are not asked for one"
        )
    recorder.report_events()


def _conclude(recipe: Recipe, parts: Parts, recorder: Recorder, *, untrained: bool) -> None:
    if recipe.grpo is not None and untrained:
        recorder.message(
            "grpo took no step: in no group of any batch did the rewards differ, so the weights are unchanged. The "
            "policy must earn a reward now and then: start from one that can, keep sft, or look at env.reward"
        )
    if recipe.env is not None and parts.environment.errors:
        became = "counted as 0" if recipe.env.on_error == "zero" else "were left out of training"
        recorder.message(
            f"{parts.environment.errors} answers could not be judged and {became} (env.on_error={recipe.env.on_error})"
        )
