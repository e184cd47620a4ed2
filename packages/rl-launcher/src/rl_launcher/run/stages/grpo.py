"""The GRPO stage: prompts, rollouts, rewards, steps, refit; the loops are `rl_algorithms.grpo` and `async_grpo`."""

from dataclasses import replace
from typing import Any

from rl_algorithms import async_grpo, grpo
from rl_algorithms.background_collection import gated
from rl_algorithms.data import ShuffledBatches
from rl_algorithms.rollouts import Rollouts
from rl_launcher.build.parts import Parts
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import start_stage
from rl_launcher.run.step_recording import StepRecording, timings_of
from rl_launcher.schema import GRPOStage, Recipe
from rl_observe import ScoredResponse


def run(stage: GRPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps; the engine holds the policy's weights before, between and after."""
    policy, engine, generation = parts.policy, parts.engine, recipe.policy.generation
    started = start_stage(
        "grpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=generation.temperature,
        with_reference=stage.keeps_reference,
    )
    prompts = ShuffledBatches(parts.data.prompts, size=stage.num_prompts, seed=recipe.seed)
    latest: list[Rollouts] = []
    recording = StepRecording(recorder.log.recorded_steps, "grpo", stage, recipe=recipe, parts=parts)

    def on_rollouts(rollouts: Rollouts) -> None:
        latest[:] = [rollouts]
        recording.on_rollouts(rollouts)

    shared: dict[str, Any] = {
        "policy": recording.observed(policy),
        "weight_sync": parts.weight_sync,
        "environment": parts.judge,
        "prompts": prompts,
        "chat": parts.data.chat,
        "sampling": generation.sampling(),
        "reference": started.reference,
        "version": policy.version,
        "steps_taken": started.taken,
        "seed": recipe.seed,
        "on_rollouts": on_rollouts,
    }
    buffer = None
    if stage.async_grpo is None:
        if started.taken and recorder.progress.order is not None:
            prompts.load_state(recorder.progress.order)  # a step may have taken several batches of prompts
        greedy = generation.sampling(greedy=True)
        steps = grpo.train(engine=engine, config=stage, greedy=greedy, **shared)
    else:
        config = stage.asynchronous()
        if recipe.cluster.runtime == "ray":  # these engines take weights while they generate, and need not pause
            config = replace(config, weights="in_flight")
        buffer = async_grpo.make_buffer(config, steps_taken=started.taken)
        if started.state is not None:
            buffer.load_state_dict(started.state)
        # Collectors draw prompts ahead of the steps, so the buffer knows where the prompts stand.
        first = buffer.oldest_ticket // stage.num_prompts * stage.num_prompts
        prompts.load_state({**prompts.state(), "drawn": first})
        alone = config.weights == "between_calls"
        gated(engine, buffer=buffer, environment=parts.environment if alone else None)  # refuses judges that sample it
        collecting = engine.collecting(buffer, recorder.log.spans)
        steps = async_grpo.train(engine=collecting, config=config, buffer=buffer, **shared)
    taken, learning_rate = started.taken, policy.learning_rate
    while (metrics := recording.next_of(steps, number=taken + stage.steps_per_generation)) is not None:
        previous, taken = taken, taken + stage.steps_per_generation
        extra = {"learning_rate": learning_rate, **parts.weight_sync.metrics()}
        if recipe.evaluation.due(previous, taken):
            # The engine is idle, or takes any number of callers: it gets no new weights before the next step.
            with recorder.phase("evaluate"):
                extra |= evaluator.quick()
        recording.record(taken, timings=timings_of(metrics))
        recorder.step(
            "grpo",
            taken,
            {**metrics, **extra},
            order=prompts.state() if buffer is None else None,
            state=None if buffer is None else buffer.state_dict,
            samples=lambda: _two_samples(latest[0], parts),
        )
        learning_rate = policy.learning_rate


def _two_samples(rollouts: Rollouts, parts: Parts) -> list[ScoredResponse]:
    """Two responses to one prompt with their rewards, for a person who asks why there is no signal."""
    rows = (rollouts.groups == rollouts.groups[0]).nonzero()[:2, 0].tolist()
    starts = [int(rollouts.response[row].int().argmax()) for row in rows]  # where the first response begins
    return [
        ScoredResponse(
            prompt=parts.tokenizer.decode(rollouts.tokens[row, :start]),
            response=rollouts.answers[row],
            reward=rollouts.rewards[row].item(),
        )
        for row, start in zip(rows, starts, strict=True)
    ]
