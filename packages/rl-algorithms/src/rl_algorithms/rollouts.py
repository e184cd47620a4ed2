"""Rollouts: prompts to sampled, judged answers, as tensors. Knows no loss.

Tokens in, tokens out: what the engine sampled is what will be trained on; text is made only for the environment.

Axes: P prompts, G rollouts a prompt, B = P * G rows, T tokens.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Conversation, Engine, Environment, Rollout
from rl_algorithms.padding import pad
from rl_algorithms.phases import PhaseTimer

__all__ = ["Rollouts", "collect"]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What the sampler made and the environment said of it. Row `p * G + g` answers prompt `p`."""

    tokens: Int[Tensor, "B T"]
    """Prompt then response, right-padded with 0."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    response: Bool[Tensor, "B T"]
    """True where the policy chose the token: not the prompt, not padding."""

    logp_old: Float[Tensor, "B T"]
    """The sampler's log-probability of each response token; 0 elsewhere."""

    rewards: Float[Tensor, "P G"]
    """float64, so that large rewards that differ a little still differ."""

    truncated: Bool[Tensor, " B"]
    """Rows that ended at the token limit."""

    answers: tuple[str, ...]
    """The B responses as text, for people to read."""


def collect(
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
    timer: PhaseTimer,
) -> Rollouts:
    """Sample `group_size` answers to each prompt and have each judged once.

    Raises:
        ValueError: the engine returned another number of rollouts than asked for, or a log-probability that is
            missing or not finite; or the environment did not terminate after one answer.
    """
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    with timer.phase("generate"):
        rollouts = engine.generate([prompt.tokens for prompt in asked], sampling)
    _check(asked, rollouts)
    with timer.phase("reward"):
        answers = tuple(chat.text(rollout.tokens) for rollout in rollouts)
        rewards = _judge(asked, answers, environment)
    rows = [(*prompt.tokens, *rollout.tokens) for prompt, rollout in zip(asked, rollouts, strict=True)]
    padded = pad(rows, answer_starts=[len(prompt.tokens) for prompt in asked])
    logp_old = torch.zeros(padded.tokens.shape)
    logp_old[padded.answer] = torch.tensor(list(itertools.chain.from_iterable(rollout.logp for rollout in rollouts)))
    return Rollouts(
        tokens=padded.tokens,
        lengths=padded.lengths,
        response=padded.answer,
        logp_old=logp_old,
        rewards=torch.tensor(rewards, dtype=torch.float64).view(len(prompts), group_size),
        truncated=torch.tensor([rollout.truncated for rollout in rollouts]),
        answers=answers,
    )


def _check(asked: Sequence[Prompt], rollouts: Sequence[Rollout]) -> None:
    if len(rollouts) != len(asked):
        raise ValueError(f"the engine returned {len(rollouts)} rollouts for {len(asked)} prompts")
    for index, rollout in enumerate(rollouts):
        if not rollout.tokens or len(rollout.logp) != len(rollout.tokens):
            raise ValueError(
                f"rollout {index} has {len(rollout.tokens)} tokens and {len(rollout.logp)} log-probabilities; "
                f"each sampled token needs one, and an answer has at least its stop token"
            )
        if not all(map(math.isfinite, rollout.logp)):
            raise ValueError(f"rollout {index} has a log-probability that is not finite: {list(rollout.logp)}")


def _judge(asked: Sequence[Prompt], answers: Sequence[str], environment: Environment) -> list[float]:
    conversations = [
        Conversation(messages=prompt.row.messages, answer=answer, row=prompt.row.columns)
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    returns = environment.step(conversations)
    if len(returns) != len(asked) or not all(item.terminated for item in returns):
        raise ValueError(
            f"the environment must end each of the {len(asked)} conversations after one answer; it returned "
            f"{len(returns)}, of which {sum(item.terminated for item in returns)} ended. Multi-turn is not offered here"
        )
    return [item.reward for item in returns]
