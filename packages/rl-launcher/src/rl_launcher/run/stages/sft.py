"""The SFT stage: the policy learns to imitate demonstrations; the engine gets the weights at the end."""

from itertools import islice

from rl_algorithms import sft
from rl_algorithms.data import batches
from rl_launcher.build.parts import Parts
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import Recipe, SFTStage


def run(stage: SFTStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps, then refit."""
    policy = parts.policy
    started = start_stage("sft", stage.optimizer, num_steps=stage.max_num_steps, parts=parts, recorder=recorder)
    taken = started.taken
    recording = StepRecording(recorder.log.recorded_steps, "sft", stage, recipe=recipe, parts=parts)
    demonstrations = islice(batches(parts.data.demonstrations, size=stage.batch_size, seed=recipe.seed), taken, None)
    learning_rate = policy.learning_rate
    steps = sft.train(
        policy=recording.observed(policy),
        demonstrations=recording.telling_sources(demonstrations, lambda item: item.row.where),
        config=stage,
        version=policy.version,
        steps_taken=taken,
    )
    for index, metrics in recording.numbered(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        is_last = index == stage.max_num_steps
        if is_last or recipe.evaluation.due(index - 1, index):
            # The loss is the policy's own, and needs no engine.
            if recipe.env is not None or (is_last and recipe.generates):
                with recorder.phase("refit"):
                    parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra |= evaluator.quick() | evaluator.loss()
        recording.record(index, timings=timings_of(metrics))
        recorder.step("sft", index, {**metrics, **extra})
        learning_rate = policy.learning_rate
