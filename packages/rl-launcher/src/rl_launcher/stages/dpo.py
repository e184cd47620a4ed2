"""The DPO stage: pairs of answers, the policy's own or given ones, and the margin between them widened."""

from rl_algorithms import dpo
from rl_launcher.evaluating import Evaluator
from rl_launcher.parts import Parts
from rl_launcher.recipe_schema import DPOStage, Recipe
from rl_launcher.recording import Recorder
from rl_launcher.stages.pairs import StagePairs, compare, find_pairs, kept, sample_pairs
from rl_launcher.stages.starting import StageStart, start_stage

__all__ = ["run"]


def run(stage: DPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Find the pairs, train for the stage's steps, refit; held-out pairs measure what was not trained on."""
    policy = parts.policy
    started = start_stage(
        "dpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=recipe.policy.generation.temperature if stage.pairs == "sampled" else 1.0,
    )
    taken = started.taken
    pairs = _pairs(stage, started, recipe=recipe, parts=parts, recorder=recorder)
    recorder.message(f"dpo: {pairs.describe()}")
    if not taken and pairs.held_out is not None:
        with recorder.phase("evaluate"):
            recorder.evaluation("dpo", _margins(pairs, stage, parts))
    learning_rate = policy.learning_rate
    steps = dpo.train(
        policy=policy,
        examples=pairs.train,
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in enumerate(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        is_last = index == stage.max_num_steps
        if is_last or evaluator.due(index - 1, index):
            if is_last or recipe.env is not None:  # margins are the policy's own, and ask no engine
                with recorder.phase("refit"):
                    parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra |= evaluator.quick() | _margins(pairs, stage, parts)
        recorder.step("dpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def _pairs(stage: DPOStage, started: StageStart, *, recipe: Recipe, parts: Parts, recorder: Recorder) -> StagePairs:
    """Those of an earlier process of the run; or new ones, with the policy as it is now as their reference."""
    if started.taken:
        return find_pairs(started.tensors, recipe=recipe, parts=parts)
    if stage.pairs == "data":
        pairs = find_pairs({}, recipe=recipe, parts=parts)
    else:
        with recorder.phase("generate"):
            pairs = sample_pairs(stage, recipe=recipe, parts=parts)
    if not stage.reference_free:
        with recorder.phase("reference"):
            pairs = compare(pairs, parts.policy, heard=recorder.check)
    if stage.pairs == "sampled" or not stage.reference_free:
        recorder.keep(kept(pairs, given=stage.pairs == "data"))
    recorder.check()
    return pairs


def _margins(pairs: StagePairs, stage: DPOStage, parts: Parts) -> dict[str, float]:
    if pairs.held_out is None:
        return {}
    measured = dpo.margins(parts.policy, pairs.held_out, stage)
    return {f"held_out_{name}": value for name, value in measured.items()}
