"""The reward model stage: a model that starts from the policy learns from pairs which response is better."""

from rl_algorithms import reward_model
from rl_algorithms.preferences.pairs import rows_of_pairs
from rl_algorithms.stepping import take_rows
from rl_launcher.build.companions import reward_model_folder
from rl_launcher.build.parts import Parts
from rl_launcher.errors import Refusal
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import Recipe, RewardModelStage

NAME = "reward_model"


def run(stage: RewardModelStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps, and save the reward model in the run directory.

    Raises:
        Refusal: the parts were built without pairs.
    """
    del evaluator  # it samples responses of the policy, which does not change here
    progress, pairs, folder = recorder.progress, parts.reward_pairs, reward_model_folder(recorder.keeper.run)
    if pairs is None:
        raise Refusal("the reward_model stage has no pairs: reward_model.data or data names them")
    taken = progress.steps_of(NAME)
    if taken == stage.max_num_steps and folder.is_dir():  # this resumed run has finished the stage
        progress.versions = parts.versions
        return
    model = parts.companions.make(
        NAME, policy=parts.policy, folder=recorder.keeper.start_folder(NAME), seed=recipe.seed
    )
    model.start_training(stage.optimizer, num_steps=stage.max_num_steps)
    recorder.log.profiler.reached(NAME, taken)
    parts.reached(NAME, taken)
    if taken:
        model.load_checkpoint(progress.weights(NAME))
    else:
        progress.tensors, progress.state, progress.keep_state = {}, None, None
    progress.versions = parts.versions
    number = min(len(pairs.held_out.tokens) // 2, recipe.evaluation.max_prompts_while_training)
    held_out = take_rows(pairs.held_out_scored, rows_of_pairs(range(number)))

    def measured() -> dict[str, float]:
        with recorder.phase("evaluate"):
            return {f"held_out_{name}": value for name, value in reward_model.evaluate(model, held_out).items()}

    recorder.message(f"{NAME}: {len(pairs.train.tokens) // 2} pairs to train on, {number} held out")
    if not taken:
        recorder.evaluation(NAME, measured())
    recording = StepRecording(recorder.log.recorded_steps, NAME, stage, recipe=recipe, parts=parts, model=model)
    recording.draws(len(pairs.train.tokens) // 2, word="pair", size=stage.batch_size, seed=recipe.seed, taken=taken)
    learning_rate = model.learning_rate
    steps = reward_model.train(
        model=recording.observed(parts.companions.scoring(NAME)),
        examples=pairs.scored,
        config=stage,
        version=model.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in recording.numbered(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        if index == stage.max_num_steps or recipe.evaluation.due(index - 1, index):
            extra |= measured()
        recording.record(index, timings=timings_of(metrics))
        recorder.step(NAME, index, {**metrics, **extra})
        learning_rate = model.learning_rate
    parts.companions.finish(NAME, folder, tokenizer=parts.tokenizer)
    progress.versions = parts.versions
