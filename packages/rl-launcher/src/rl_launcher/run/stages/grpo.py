"""The GRPO stage: prompts, rollouts, rewards, steps, refit; the loops are `rl_algorithms.grpo` and `async_grpo`.

Knows no engine: whether sampling goes on while the policy trains is the recipe's choice, and the same parts serve both.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rl_algorithms import async_grpo, grpo
from rl_algorithms.background_collection import gated
from rl_algorithms.data import ShuffledBatches
from rl_launcher.build import sampling
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages.start_stage import StageStart, start_stage
from rl_launcher.run_parts import Parts
from rl_launcher.schema import GRPOStage, Recipe
from rl_observe import SpanLog

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop that is ready to go, and what it must be told to go on from any of its steps."""

    steps: Iterator[dict[str, float]]
    order: Callable[[], dict[str, int]] | None = None
    """Where the prompts stand after a step; None where `state` says so."""
    state: Callable[[], dict[str, Any]] | None = None
    """What a checkpoint keeps besides."""


def run(stage: GRPOStage, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Train for the stage's steps; the engine holds the policy's weights before, between and after."""
    policy, generation = parts.policy, recipe.policy.generation
    started = start_stage(
        "grpo",
        stage.optimizer,
        num_steps=stage.max_num_steps,
        parts=parts,
        recorder=recorder,
        temperature=generation.temperature,
        with_reference=stage.objective.kl.weight > 0,
    )
    shared: dict[str, Any] = {
        "policy": policy,
        "engine": parts.engine,
        "weight_sync": parts.weight_sync,
        "environment": parts.environment,
        "chat": parts.chat,
        "sampling": sampling(generation),
        "reference": started.reference,
        "version": policy.version,
        "steps_taken": started.taken,
        "seed": recipe.seed,
    }
    prompts = ShuffledBatches(parts.prompts, size=stage.num_prompts, seed=recipe.seed)
    on_ray = recipe.cluster.runtime == "ray"
    begin = (
        _take_turns if stage.async_grpo is None else partial(_at_the_same_time, on_ray=on_ray, spans=recorder.log.spans)
    )
    loop = begin(stage, shared, prompts=prompts, started=started, order=recorder.progress.order)
    taken, learning_rate = started.taken, policy.learning_rate
    for metrics in loop.steps:
        previous, taken = taken, taken + stage.steps_per_generation
        extra = {"learning_rate": learning_rate, **parts.weight_sync.metrics()}
        if evaluator.due(previous, taken):
            # The engine rests, or takes any number of callers: nothing brings it new weights before the next step.
            with recorder.phase("evaluate"):
                extra |= evaluator.quick()
        order = None if loop.order is None else loop.order()
        recorder.step("grpo", taken, {**metrics, **extra}, order=order, state=loop.state)
        learning_rate = policy.learning_rate


def _take_turns(
    stage: GRPOStage,
    shared: dict[str, Any],
    *,
    prompts: ShuffledBatches[Any],
    started: StageStart,
    order: dict[str, int] | None,
) -> Loop:
    if started.taken and order is not None:
        prompts.load_state(order)  # a step may have taken several batches of prompts
    return Loop(steps=grpo.train(prompts=prompts, config=stage, **shared), order=prompts.state)


def _at_the_same_time(
    stage: GRPOStage,
    shared: dict[str, Any],
    *,
    prompts: ShuffledBatches[Any],
    started: StageStart,
    order: dict[str, int] | None,  # noqa: ARG001 - the buffer knows: collectors draw prompts ahead of the steps
    on_ray: bool,
    spans: SpanLog,
) -> Loop:
    config = stage.asynchronous()
    if on_ray:  # the engines' own door lets weights in, for which they need not rest all at the same time
        config = replace(config, weights="in_flight")
    buffer = async_grpo.make_buffer(config, steps_taken=started.taken)
    if started.state is not None:
        buffer.load_state_dict(started.state)
    first = buffer.oldest_ticket // stage.num_prompts * stage.num_prompts
    prompts.load_state({**prompts.state(), "drawn": first})
    engine, alone = shared["engine"], config.weights == "between_calls"
    gated(engine, buffer=buffer, environment=shared["environment"] if alone else None)  # refuses judges that ask it
    steps = async_grpo.train(
        prompts=prompts, config=config, buffer=buffer, **{**shared, "engine": engine.collecting(buffer, spans)}
    )
    return Loop(steps=steps, state=buffer.state_dict)
