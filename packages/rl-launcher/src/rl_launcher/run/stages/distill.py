"""The distillation stage: the policy's own responses, scored token by token by a teacher."""

from rl_algorithms import distill
from rl_algorithms.data import ShuffledBatches
from rl_launcher.build.parts import Parts
from rl_launcher.errors import Refusal
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import DistillStage, Recipe


def run(stage: DistillStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps; the reward is measured but not learned from.

    Raises:
        Refusal: the parts were built without a teacher.
    """
    policy, generation = parts.policy, recipe.policy.generation
    if parts.teacher is None:
        raise Refusal("the distill stage has no teacher: distill.teacher.model_name names one")
    started = start_stage(
        "distill",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=generation.temperature,
    )
    prompts = ShuffledBatches(parts.data.prompts, size=stage.num_prompts, seed=recipe.seed)
    if started.taken and recorder.progress.order is not None:
        prompts.load_state(recorder.progress.order)
    recording = StepRecording(recorder.log.recorded_steps, "distill", stage, recipe=recipe, parts=parts)
    taken, learning_rate = started.taken, policy.learning_rate
    steps = distill.train(
        policy=recording.observed(policy),
        teacher=parts.teacher,
        engine=parts.engine,
        weight_sync=parts.weight_sync,
        prompts=prompts,
        chat=parts.data.chat,
        sampling=generation.sampling(),
        config=stage,
        environment=parts.environment,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
        on_rollouts=recording.on_rollouts,
    )
    while (metrics := recording.next_of(steps, number=taken + stage.steps_per_generation)) is not None:
        previous, taken = taken, taken + stage.steps_per_generation
        extra = {"learning_rate": learning_rate, **parts.weight_sync.metrics()}
        if recipe.evaluation.due(previous, taken):
            with recorder.phase("evaluate"):
                extra |= evaluator.quick()
        recording.record(taken, timings=timings_of(metrics))
        recorder.step("distill", taken, {**metrics, **extra}, order=prompts.state())
        learning_rate = policy.learning_rate
