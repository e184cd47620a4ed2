"""The DPO stage, on pairs that are given, sampled once, or sampled before each step: `dpo` and `online_dpo`."""

from rl_algorithms import dpo, online_dpo
from rl_algorithms.data import ShuffledBatches
from rl_algorithms.preferences.dpo_pairs import DPOPairs, sample_pairs
from rl_launcher.build.parts import Parts
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import StageStart, start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import DPOStage, Recipe


def run(stage: DPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Find the pairs, train for the stage's steps, refit; held-out pairs measure what was not trained on."""
    policy = parts.policy
    started = start_stage(
        "dpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=1.0 if stage.pairs == "data" else recipe.policy.generation.temperature,
        with_reference=stage.keeps_reference,
    )
    if stage.pairs == "online":
        _train_online(stage, started, recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)
        return
    taken = started.taken
    pairs = find_pairs(stage, started, recipe=recipe, parts=parts, recorder=recorder)
    recorder.message(f"dpo: {pairs.describe()}")

    def margins() -> dict[str, float]:
        measured = {} if pairs.held_out is None else dpo.margins(policy, pairs.held_out, stage)
        return {f"held_out_{name}": value for name, value in measured.items()}

    if not taken and pairs.held_out is not None:
        with recorder.phase("evaluate"):
            recorder.evaluation("dpo", margins())
    recording = StepRecording(recorder.log.recorded_steps, "dpo", stage, recipe=recipe, parts=parts)
    recording.draws(len(pairs.train.tokens) // 2, word="pair", size=stage.batch_size, seed=recipe.seed, taken=taken)
    learning_rate = policy.learning_rate
    steps = dpo.train(
        policy=recording.observed(policy),
        examples=pairs.train,
        config=stage,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
    )
    for index, metrics in recording.numbered(steps, start=taken + 1):
        extra = {"learning_rate": learning_rate}
        is_last = index == stage.max_num_steps
        if is_last or recipe.evaluation.due(index - 1, index):
            # Margins are the policy's own, and need no engine.
            if recipe.env is not None or (is_last and recipe.generates):
                with recorder.phase("refit"):
                    parts.weight_sync(version=policy.version)
            with recorder.phase("evaluate"):
                extra |= evaluator.quick() | margins()
        recording.record(index, timings=timings_of(metrics))
        recorder.step("dpo", index, {**metrics, **extra})
        learning_rate = policy.learning_rate


def _train_online(
    stage: DPOStage, started: StageStart, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder
) -> None:
    policy, taken = parts.policy, started.taken
    prompts = ShuffledBatches(parts.data.prompts, size=stage.num_prompts, seed=recipe.seed)
    if taken and recorder.progress.order is not None:
        prompts.load_state(recorder.progress.order)
    recording = StepRecording(recorder.log.recorded_steps, "dpo", stage, recipe=recipe, parts=parts)
    learning_rate = policy.learning_rate
    steps = online_dpo.train(
        policy=recording.observed(policy),
        engine=parts.engine,
        weight_sync=parts.weight_sync,
        environment=parts.environment,
        prompts=prompts,
        chat=parts.data.chat,
        sampling=recipe.policy.generation.sampling(),
        config=stage,
        reference=started.reference,
        version=policy.version,
        steps_taken=taken,
        seed=recipe.seed,
        on_rollouts=recording.on_rollouts,
    )
    for index, metrics in recording.numbered(steps, start=taken + 1):
        taken = index
        extra = {"learning_rate": learning_rate, **parts.weight_sync.metrics()}
        if recipe.evaluation.due(taken - 1, taken):
            with recorder.phase("evaluate"):
                extra |= evaluator.quick()
        recording.record(taken, timings=timings_of(metrics))
        recorder.step("dpo", taken, {**metrics, **extra}, order=prompts.state())
        learning_rate = policy.learning_rate


def find_pairs(stage: DPOStage, started: StageStart, *, recipe: Recipe, parts: Parts, recorder: Recorder) -> DPOPairs:
    """Those of an earlier process of the run, or new ones with the current policy as their reference."""
    most = recipe.evaluation.max_prompts_while_training
    is_given = stage.pairs == "data"
    if parts.data.pairs is not None and is_given:
        given = parts.data.pairs
        pairs = DPOPairs.given(given.train, given.held_out, max_held_out=most, tensors=started.tensors)
    elif started.taken:
        pairs = DPOPairs.sampled_from(started.tensors)
    else:
        with recorder.phase("generate"):
            pairs = sample_pairs(
                stage,
                prompts=parts.data.prompts,
                held_out=parts.data.held_out[:most],
                engine=parts.engine,
                sampling=recipe.policy.generation.sampling(),
                environment=parts.environment,
                chat=parts.data.chat,
                seed=recipe.seed,
            )
    if started.taken:
        return pairs
    if not stage.reference_free:
        with recorder.phase("reference"):
            pairs = pairs.compared(parts.policy, between=recorder.check)
    if not (is_given and stage.reference_free):
        recorder.progress.tensors = pairs.tensors(given=is_given)  # into every checkpoint: they cannot be made again
    recorder.check()
    return pairs
