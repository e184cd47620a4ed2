"""Held-out accuracy: the mean reward of answers to prompts that nothing was trained on, with its uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import Rollouts, collect

__all__ = ["Accuracy", "evaluate"]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The mean reward of one answer to each prompt."""

    mean: float
    """In the units of the reward: the share of right answers where the reward is 0 or 1."""

    standard_error: float
    """Of the mean, over prompts: std / sqrt(prompts)."""

    rollouts: Rollouts
    """The answers themselves, in the order of the prompts."""


def evaluate(
    prompts: Sequence[Prompt],
    *,
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
) -> Accuracy:
    """Sample one answer to each prompt and judge it."""
    rollouts = collect(
        prompts,
        group_size=1,
        engine=engine,
        sampling=sampling,
        environment=environment,
        chat=chat,
        timer=PhaseTimer(),
    )
    rewards = rollouts.rewards[:, 0]
    error = rewards.std().item() / math.sqrt(len(prompts)) if len(prompts) > 1 else math.nan
    return Accuracy(mean=rewards.mean().item(), standard_error=error, rollouts=rollouts)
