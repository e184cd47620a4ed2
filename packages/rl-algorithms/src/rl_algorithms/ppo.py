"""PPO with a value function, whole: a critic learns what each state is worth, and every token has its own advantage.

    r[t]     = reward of the answer that ends at t, else 0, less beta k1[t]        KL in the reward policy_gradient
    delta[t] = r[t] + gamma V[t+1] - V[t];  A[t] = delta[t] + gamma lambda A[t+1]  GAE                  advantages
    R[t]     = A[t] + V[t], by the critic's lambda                                 what it learns   value_function
    L        = clip(rho, whitened A) of the policy, and half the squared error of the critic        policy_gradient

t + 1 is the next token that the policy chose: observations between answers are no steps, V and A pass through them.
After an ended answer V is 0, and so it is after one that a limit cut off, unless `value.bootstrap_truncated`. The
critic has an optimizer of its own, so that its loss needs no weight. Axes: B rows, T tokens.
References: PPO (arXiv:1707.06347), GAE (arXiv:1506.02438), VAPO (arXiv:2504.05118).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch

from rl_algorithms import grpo, observation, presets, value_function
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Engine, Environment, Policy, Reference, ValueModel, WeightSync
from rl_algorithms.objective import AdvantageConfig, Objective
from rl_algorithms.policy_gradient import Examples, reward_tokens
from rl_algorithms.rollouts import Rollouts, collect_batch, describe, episode_seed
from rl_algorithms.stepping import PhaseTimer, batches_left, bring_weights, checked_batches, mean_of_steps, take_rows
from rl_algorithms.value_function import ValueConfig, ValueExamples, describe_values

__all__ = ["Examples", "PPOConfig", "ValueConfig", "ValueExamples", "explain", "prepare", "take_steps", "train"]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """What a PPO run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps of either model to take at most, a multiple of `steps_per_generation`."""

    num_prompts: int = 256
    """Prompts in each batch of rollouts."""

    num_generations_per_prompt: int = 1
    """Rollouts of each prompt. The critic is the baseline, so one will do, and more prompts say more."""

    steps_per_generation: int = 4
    """Optimizer steps on each batch of rollouts, all epochs together."""

    num_epochs: int = 1
    """How often each rollout is trained on. More learns more from it, and further off-policy."""

    max_turns: int = 1
    """Answers in one conversation at most, where the environment goes on after the first."""

    max_length: int | None = None
    """Tokens that a conversation may have before it is answered again. Null is no bound but the engine's context."""

    value: ValueConfig = field(default_factory=ValueConfig)
    """What is made of values, and how they are learnt."""

    objective: Objective = field(default_factory=presets.ppo)
    """Clip, correction, KL and mean. Its `advantage` stays without baseline and scale: the critic is in their place."""

    def __post_init__(self) -> None:
        counts = ("max_num_steps", "num_prompts", "num_generations_per_prompt", "steps_per_generation", "num_epochs")
        check_fields(self, at_least={**dict.fromkeys((*counts, "max_turns"), 1), "max_length": 2})
        for whole, part in (("max_num_steps", "steps_per_generation"), ("steps_per_generation", "num_epochs")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} must be a multiple of {part}={getattr(self, part)}")
        self.objective.refuse_off_policy(self.steps_per_generation)
        if (advantage := self.objective.advantage) != AdvantageConfig(baseline="none", scale="none"):
            raise ValueError(f"objective.advantage={advantage} must be as in presets.ppo(): the critic compares")


def train(
    *,
    policy: Policy,
    value_model: ValueModel,
    engine: Engine[SamplingT],
    weight_sync: WeightSync,
    environment: Environment,
    prompts: Iterator[list[Prompt]],
    chat: Chat,
    sampling: SamplingT,
    config: PPOConfig,
    reference: Reference | None = None,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
    on_rollouts: Callable[[Rollouts], object] = lambda _: None,
) -> Iterator[dict[str, float]]:
    """Train both models for `max_num_steps` each; what is given, yielded and needed to go on is as for `grpo.train`."""
    timer = PhaseTimer()
    ask: dict[str, Any] = {"engine": engine, "sampling": sampling, "chat": chat, "environment": environment}
    left = batches_left(config, steps_taken=steps_taken)
    given = checked_batches(prompts, name="prompts", wanted=len(left), size=config.num_prompts)
    for number, taken in left:
        rollouts = collect_batch(given, config, number=number, version=version, seed=seed, timer=timer, **ask)
        on_rollouts(rollouts)
        with timer.phase("train"):
            ready = prepare(rollouts, config, value_model=value_model, policy=policy, reference=reference)
            ready = observation.number_rows(ready[0], rollouts, config.objective), ready[1]
            steps = take_steps(ready, config, policy=policy, value_model=value_model, seed=episode_seed(seed, number))
        metrics = describe(rollouts, version=version) | describe_values(ready[1])
        version += len(steps)
        if steps:  # nothing to train on, no step, nothing new to transfer
            bring_weights(weight_sync, version=version, timer=timer)
        yield {**metrics, **mean_of_steps(steps), "version": version, "steps_taken": taken, **timer.lap()}


def explain(config: PPOConfig) -> str:
    """The formula that the configuration amounts to: the objective's, with the critic's lines as its advantage."""
    return value_function.explain(config.value, objective=config.objective.explain())


def prepare(
    rollouts: Rollouts, config: PPOConfig, *, value_model: ValueModel, policy: Policy, reference: Reference | None
) -> tuple[Examples, ValueExamples]:
    """Make the rollouts of one batch, those of every rank, ready for both models; refuses what `grpo.prepare` does."""
    kept, examples, rewards = reward_tokens(rollouts, config.objective, policy=policy, reference=reference)
    advantage, of_values = value_function.estimate(
        value_model, examples, rewards=rewards, truncated=kept.truncated, config=config.value
    )
    return replace(examples, advantage=advantage.to(of_values.values_old.dtype)), of_values


def take_steps(
    ready: tuple[Examples, ValueExamples], config: PPOConfig, *, policy: Policy, value_model: ValueModel, seed: int
) -> list[dict[str, float]]:
    """Deal the rows over the minibatches of each epoch anew, and take a step of either model on each."""
    examples, of_values = ready
    shuffle = torch.Generator().manual_seed(seed)  # the same when a run is resumed here
    rows = examples.trainable.any(dim=1).nonzero()[:, 0]
    minibatches = config.steps_per_generation // config.num_epochs
    return [
        grpo.step(policy, take_rows(examples, part), config.objective)
        | value_function.step(value_model, take_rows(of_values, part), clip=config.value.clip)
        for _ in range(config.num_epochs)
        for part in rows[torch.randperm(len(rows), generator=shuffle)].tensor_split(minibatches)
        if len(part)
    ]
