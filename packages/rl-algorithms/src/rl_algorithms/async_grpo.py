"""Asynchronous GRPO: threads sample with weights that are a little old while the caller's thread trains.

    staleness = version of the policy - version of the oldest weights that sampled a token of the group

It is at no step above `max_staleness`. With S steps on each batch of n groups, a group may wait for
k = (max_staleness - (S - 1)) // S batches, and is begun only while

    groups begun - groups trained on < (k + 1) n                                (AReaL, arXiv:2505.24298, in groups)

k = 0 is `grpo.train`: nothing is sampled while the policy trains, and a `UserWarning` says so. Groups that are
overtaken while they are sampled, and so become too old, are dropped, counted, and by default asked again. The loss is
`grpo`'s: a ratio to the sampler makes up for staleness, as do importance weights to a recomputed proximal policy; with
neither it is refused. Threads have no common clock: ranks that each run this loop would train on different rollouts;
run it in one process that drives them. `replay` has the buffer, `staleness` k, `background_collection` the threads, and
the `GatedEngine` for judges too.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_algorithms.background_collection import Collectors, gated
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment, Policy, Reference, WeightSync
from rl_algorithms.grpo import GRPOConfig, minibatches, prepare, step
from rl_algorithms.observation import number_rows
from rl_algorithms.replay import ReplayBuffer, checked_buffer
from rl_algorithms.rollouts import Rollouts, collect, concatenate, describe, episode_seed, require_some_judged
from rl_algorithms.staleness import AsyncConfig, batches_ahead, explain_bound, refuse_uncorrected
from rl_algorithms.stepping import PhaseTimer, batches_left, mean_of_steps

__all__ = ["AsyncGRPOConfig", "make_buffer", "train"]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncGRPOConfig(GRPOConfig, AsyncConfig):
    """What an asynchronous run may choose: everything of GRPO, and how sampling goes on meanwhile."""

    def __post_init__(self) -> None:
        GRPOConfig.__post_init__(self)
        AsyncConfig.__post_init__(self)
        if (asked := self.objective.selection.max_generation_batches) > 1:
            raise ValueError(f"selection.max_generation_batches={asked} must be 1: this loop asks no more for signal")
        if self.objective.advantage.compares_greedy:
            raise ValueError("advantage.estimator compares with greedy responses: this loop samples none; use grpo")
        if self.batches_ahead:
            refuse_uncorrected(self.objective, max_staleness=self.max_staleness)

    @property
    def batches_ahead(self) -> int:
        """For how many batches a group may wait: k above."""
        return batches_ahead(max_staleness=self.max_staleness, steps_per_generation=self.steps_per_generation)


def make_buffer(config: AsyncGRPOConfig, *, steps_taken: int = 0) -> ReplayBuffer:
    """An empty buffer; give it to `train` to keep its `state_dict()`, or to go on from one that it loaded."""
    size, steps = config.num_prompts, config.steps_per_generation
    return ReplayBuffer(
        capacity=(config.batches_ahead + 1) * size,
        max_staleness=config.max_staleness,
        ask_again=config.ask_again,
        num_groups=config.max_num_steps // steps * size,
        first_ticket=steps_taken // steps * size,
    )


def train(
    *,
    policy: Policy,
    engine: Engine[SamplingT],
    weight_sync: WeightSync,
    environment: Environment,
    prompts: Iterator[list[Prompt]],
    chat: Chat,
    sampling: SamplingT,
    config: AsyncGRPOConfig,
    reference: Reference | None = None,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
    buffer: ReplayBuffer | None = None,
    on_rollouts: Callable[[Rollouts], object] = lambda _: None,
) -> Iterator[dict[str, float]]:
    """As `grpo.train`, but `engine`, `environment`, `chat` and `prompts` are called by the collecting threads.

    When a dict is yielded, the engine holds the policy's weights, and, `between_calls`, rests until the next is asked
    for. Beside `grpo.train`'s it has `dropped_groups`, `buffer_groups`, and seconds: `phase_s/wait` for rollouts,
    `phase_s/drain` for calls to end before a refit, `collector_s/...` over all collectors, `wait` of them for training
    to catch up. `staleness` is that of a batch's first step. To go on with a run, give its `buffer` too, and `prompts`
    from batch `buffer.oldest_ticket // num_prompts` on; what was being sampled is asked again, and nothing twice.
    """
    if not config.batches_ahead:
        bound = {"max_staleness": config.max_staleness, "steps_per_generation": config.steps_per_generation}
        warnings.warn(explain_bound(**bound), stacklevel=2)
    buffer = checked_buffer(buffer, wanted=make_buffer(config, steps_taken=steps_taken))
    alone, timer = config.weights == "between_calls", PhaseTimer()
    asked = gated(engine, buffer=buffer, environment=environment if alone else None)
    ask: dict[str, Any] = {"engine": asked, "sampling": sampling, "environment": environment, "chat": chat}
    ask |= {"max_turns": config.max_turns, "max_length": config.max_length}
    with Collectors(
        functools.partial(collect, group_size=config.num_generations_per_prompt, **ask),
        prompts,
        buffer=buffer,
        num_prompts=config.num_prompts,
        num_threads=config.num_collectors,
        groups_per_call=config.groups_per_call,
        stop_timeout_s=config.stop_timeout_s,
        version=version,
        seed=seed,
    ) as collectors:
        for number, taken in batches_left(config, steps_taken=steps_taken):
            last = version + config.steps_per_generation - 1
            with timer.phase("wait"):
                held = buffer.take(config.num_prompts, version=last, timeout_s=config.timeout_s)
            rollouts = require_some_judged(concatenate([each.rollouts for each in held.groups]))
            on_rollouts(rollouts)
            with timer.phase("train"):
                examples = prepare(rollouts, config.objective, policy=policy, reference=reference)
                numbered = number_rows(examples, rollouts, config.objective)
                groups = rollouts.groups[numbered.rows]
                parts = minibatches(numbered, config, groups=groups, seed=episode_seed(seed, number))
                steps = [step(policy, part, config.objective) for part in parts]
            metrics = {**describe(rollouts, version=version), "dropped_groups": float(len(held.dropped))}
            version += len(steps)
            with asked.alone(timer, timeout_s=config.timeout_s) if alone else nullcontext():
                if steps:
                    collectors.refit(weight_sync, version=version, timer=timer)
                collectors.finish()
                metrics |= {"buffer_groups": float(len(buffer)), **mean_of_steps(steps), "version": version}
                yield {**metrics, "steps_taken": taken, **timer.lap(), **collectors.lap()}
