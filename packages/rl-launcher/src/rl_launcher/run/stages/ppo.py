"""The PPO stage: rollouts, rewards, values, steps of policy and critic, refit; the loop is `rl_algorithms.ppo`."""

from rl_algorithms import ppo
from rl_algorithms.data import ShuffledBatches
from rl_launcher.build.companions import reward_model_folder
from rl_launcher.build.parts import Parts
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import PPOStage, Recipe


def run(stage: PPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train policy and critic for the stage's steps."""
    policy, generation, companions = parts.policy, recipe.policy.generation, parts.companions
    started = start_stage(
        "ppo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=generation.temperature,
        with_reference=stage.keeps_reference,
    )
    # The critic starts where the policy does, or with the reward model; a resumed one goes on from its checkpoint.
    if recipe.reward_model is not None and stage.critic.start_from != "policy":
        critic = companions.make_from("critic", reward_model_folder(recorder.keeper.run))
    else:
        folder = recorder.keeper.start_folder("critic")
        critic = companions.make("critic", policy=policy, folder=folder, seed=recipe.seed)
    critic.start_training(stage.critic.optimizer, num_steps=stage.max_num_steps)
    if started.taken:
        critic.load_checkpoint(recorder.progress.weights("critic"))
    recorder.progress.versions = parts.versions
    prompts = ShuffledBatches(parts.data.prompts, size=stage.num_prompts, seed=recipe.seed)
    if started.taken and recorder.progress.order is not None:
        prompts.load_state(recorder.progress.order)
    recording = StepRecording(recorder.log.recorded_steps, "ppo", stage, recipe=recipe, parts=parts)
    taken, rates = started.taken, (policy.learning_rate, critic.learning_rate)
    steps = ppo.train(
        policy=recording.observed(policy),
        value_model=recording.valued(companions.valuing("critic")),
        engine=parts.engine,
        weight_sync=parts.weight_sync,
        environment=parts.judge,
        prompts=prompts,
        chat=parts.data.chat,
        sampling=generation.sampling(),
        config=stage,
        reference=started.reference,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
        on_rollouts=recording.on_rollouts,
    )
    while (metrics := recording.next_of(steps, number=taken + stage.steps_per_generation)) is not None:
        previous, taken = taken, taken + stage.steps_per_generation
        extra = dict(zip(("learning_rate", "value_learning_rate"), rates, strict=True)) | parts.weight_sync.metrics()
        if recipe.evaluation.due(previous, taken):
            with recorder.phase("evaluate"):
                extra |= evaluator.quick()
        recording.record(taken, timings=timings_of(metrics))
        recorder.step("ppo", taken, {**metrics, **extra}, order=prompts.state())
        rates = (policy.learning_rate, critic.learning_rate)
