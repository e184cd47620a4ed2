"""One episode while it is being sampled, and many of them laid out as tensors. Knows no engine and no environment.

Axes: B rows, T tokens, K named parts of the reward.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rl_algorithms.chat import Prompt, TextError
from rl_algorithms.contracts import Conversation, Message, Rollout
from rl_algorithms.padding import float_tensor, int_tensor, pad
from rl_algorithms.rollouts import Rollouts

__all__ = ["Episode", "lay_out"]


@dataclass(slots=True, kw_only=True)
class Episode:
    """A prompt, the answers to it and the observations between them, as they come."""

    prompt: Prompt
    row: int
    """Its place in the batch, for messages and for the order of rows."""
    group: int
    tokens: list[int] = field(init=False)
    logp: list[float] = field(init=False)
    versions: list[int] = field(init=False)
    turns: list[int] = field(init=False)
    """Of each token, which answer it belongs to; -1 for what the policy did not choose."""
    messages: tuple[Message, ...] = field(init=False)
    state: object = field(init=False)
    answer: str = ""
    num_answers: int = 0
    rewards: dict[int, float] = field(default_factory=dict)
    """By the place of the token that earned it."""
    components: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    failed: str | None = None
    unsayable: TextError | None = None
    """The tokenizer's complaint of an observation that has no tokens."""

    def __post_init__(self) -> None:
        self.tokens, self.logp, self.versions, self.turns = [], [], [], []
        self._add(self.prompt.tokens)
        self.messages, self.state = self.prompt.messages, self.prompt.state

    def __str__(self) -> str:
        """Which one it is, for error messages."""
        return f"rollout {self.row}"

    @property
    def where(self) -> str:
        """The data row and the turn, for error messages."""
        return f"{self.prompt.row.where}, answer {self.num_answers + 1}"

    def conversation(self, rollout: Rollout, answer: str) -> Conversation:
        """What the environment is to judge. The columns are its own, so that it cannot change them for others."""
        return Conversation(
            messages=self.messages,
            answer=answer,
            row=dict(self.prompt.row.columns),
            state=self.state,
            turn=self.num_answers,
            truncated=rollout.truncated,
        )

    def answered(self, rollout: Rollout, answer: str) -> None:
        """Take in what the policy said, token by token as it was sampled."""
        self.tokens += rollout.tokens
        self.logp += rollout.logp
        for span in rollout.versions:
            self.versions += [span.version] * (span.end - span.start)
        self.turns += [self.num_answers] * len(rollout.tokens)
        self.messages = (*self.messages, {"role": "assistant", "content": answer})
        self.answer, self.num_answers = answer, self.num_answers + 1
        self.truncated = rollout.truncated

    def rewarded(self, reward: float, components: Mapping[str, float]) -> None:
        """The newest answer earned this, at its last token."""
        self.rewards[len(self.tokens) - 1] = reward
        for name, value in components.items():
            self.components[name] = self.components.get(name, 0.0) + value

    def observed(self, tokens: Sequence[int], observations: Sequence[Message]) -> None:
        """Take in what the environment said."""
        self._add(tokens)
        self.messages = (*self.messages, *observations)

    def end(self, *, truncated: bool = False, failed: str | None = None) -> None:
        """Nothing follows. A failed one earned nothing, whatever its earlier answers did."""
        self.truncated, self.failed = self.truncated or truncated, failed
        if failed is not None:
            self.rewards, self.components = {}, {}

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.turns += [-1] * len(tokens)


def lay_out(
    episodes: Sequence[Episode], *, component_names: Sequence[str] = (), metrics: Mapping[str, float] | None = None
) -> Rollouts:
    """Episodes as rows of tensors, in their order."""
    padded = pad([episode.tokens for episode in episodes], answer_starts=[0] * len(episodes))
    filled, shape = padded.answer, padded.tokens.shape
    logp_old, versions, turns = torch.zeros(shape), torch.full(shape, -1), torch.full(shape, -1)
    logp_old[filled] = float_tensor(itertools.chain.from_iterable(episode.logp for episode in episodes))
    versions[filled] = int_tensor(itertools.chain.from_iterable(episode.versions for episode in episodes))
    turns[filled] = int_tensor(itertools.chain.from_iterable(episode.turns for episode in episodes))
    token_rewards = torch.zeros(shape, dtype=torch.float64)
    places = [(row, place) for row, episode in enumerate(episodes) for place in episode.rewards]
    earned = [reward for episode in episodes for reward in episode.rewards.values()]
    rows, columns = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    token_rewards[rows, columns] = torch.tensor(earned, dtype=torch.float64)
    components = [[episode.components.get(name, 0.0) for name in component_names] for episode in episodes]
    return Rollouts(
        tokens=padded.tokens,
        lengths=padded.lengths,
        response=turns >= 0,
        logp_old=logp_old,
        versions=versions,
        turns=turns,
        token_rewards=token_rewards,
        rewards=torch.tensor([sum(episode.rewards.values()) for episode in episodes], dtype=torch.float64),
        components=torch.tensor(components, dtype=torch.float64).reshape(len(episodes), len(component_names)),
        component_names=tuple(component_names),
        groups=torch.tensor([episode.group for episode in episodes]),
        truncated=torch.tensor([episode.truncated for episode in episodes]),
        failed=torch.tensor([episode.failed is not None for episode in episodes]),
        answers=tuple(episode.answer for episode in episodes),
        failures=tuple(episode.failed for episode in episodes),
        metrics=dict(metrics or {}),
    )
