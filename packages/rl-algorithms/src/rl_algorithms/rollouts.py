"""Rollouts: sampled, judged answers as tensors; rows picked out and put together. Knows no engine, no chat, no loss.

A row is everything that one episode said: the prompt, then the policy's answers with the environment's observations
between them. Only what the policy chose is `response`; the rest is context.

Axes: B rows, T tokens, K named parts of the reward.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rl_algorithms.advantages import has_signal

__all__ = ["Rollouts", "concatenate", "describe"]

PADDING = {"versions": -1, "turns": -1}
PER_TOKEN = ("tokens", "response", "logp_old", "versions", "turns", "token_rewards")
PER_ROW = ("lengths", "rewards", "components", "truncated", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What the engine made and the environment said of it, one row per episode; the rows of a group need no order."""

    tokens: Int[Tensor, "B T"]
    """The prompt, then answers and observations in turn; right-padded with 0."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    response: Bool[Tensor, "B T"]
    """True where the policy chose the token: not in the prompt, nor in observations, nor in padding."""

    logp_old: Float[Tensor, "B T"]
    """The sampler's log-probability of each response token; 0 elsewhere."""

    versions: Int[Tensor, "B T"]
    """The version of the weights that sampled each response token; -1 elsewhere."""

    turns: Int[Tensor, "B T"]
    """Which answer of its row each response token belongs to, from 0; -1 elsewhere."""

    token_rewards: Float64[Tensor, "B T"]
    """The reward of each answer, at its last token; 0 elsewhere."""

    rewards: Float64[Tensor, " B"]
    """The sum over a row's answers; float64, so that large rewards that differ a little still differ."""

    components: Float64[Tensor, "B K"]
    """The named parts of the reward, each summed over a row's answers. K may be 0."""

    component_names: tuple[str, ...] = ()
    """What the K parts are called."""

    groups: Int[Tensor, " B"]
    """Which rows answer the same prompt: those with equal numbers."""

    truncated: Bool[Tensor, " B"]
    """Rows that ended at a limit (of tokens, of turns, of the environment), and might have gone on."""

    failed: Bool[Tensor, " B"]
    """Rows that say nothing of the policy: not trained on, in no baseline. Their reward is 0."""

    answers: tuple[str, ...]
    """The last answer of each row as text, for people to read."""

    failures: tuple[str | None, ...]
    """Why a row failed; None for those that did not."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers for the log, averaged over the conversations that it judged."""

    def __len__(self) -> int:
        """How many rows there are: B."""
        return len(self.lengths)

    def take(self, rows: Tensor) -> "Rollouts":
        """Only `rows`, indices or a mask along B; what is padding in all of them goes. `metrics` stay the whole's."""
        kept = torch.arange(len(self))[rows].tolist()
        width = int(self.lengths[rows].max()) if kept else 0
        tensors = {name: getattr(self, name)[rows] for name in (*PER_ROW, "groups")}
        return Rollouts(
            **tensors,
            **{name: getattr(self, name)[rows][:, :width] for name in PER_TOKEN},
            component_names=self.component_names,
            answers=tuple(self.answers[row] for row in kept),
            failures=tuple(self.failures[row] for row in kept),
            metrics=self.metrics,
        )


def describe(rollouts: Rollouts, *, version: int) -> dict[str, float]:
    """What a batch of rollouts looks like. Failed rows are in `failed` and `sampled_tokens` only.

    Args:
        rollouts: of one batch, on all ranks together.
        version: of the weights that are about to be trained on it; `staleness` counts from there.

    Returns:
        `reward`, `reward_std` (Bessel's; over rows) and `reward/<component>`, in the units of the reward;
        `groups_with_signal`, the share of groups whose rewards differ, found exactly; `response_tokens` and
        `response_tokens_max`, of a row; `turns`, answers a row; `truncated`, a share of rows; `staleness` and
        `staleness_max`, optimizer steps, over response tokens; `failed`, a share of rows; `sampled_tokens` of all rows;
        and the environment's own metrics as `environment/<name>`. Where no row is left, only the last three.
    """
    figures = {
        "failed": rollouts.failed.double().mean().item(),
        "sampled_tokens": float(rollouts.response.sum()),
        **{f"environment/{name}": value for name, value in rollouts.metrics.items()},
    }
    kept = ~rollouts.failed
    if not kept.any():
        return figures
    rewards, groups, truncated = (each[kept] for each in (rollouts.rewards, rollouts.groups, rollouts.truncated))
    response, turns = rollouts.response[kept], rollouts.turns[kept]
    tokens = response.sum(dim=1).double()
    age = (version - rollouts.versions[kept])[response].double()
    with_signal = set(groups[has_signal(rewards, groups)].tolist())
    parts = rollouts.components[kept].mean(dim=0).tolist()
    figures |= {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=min(1, len(rewards) - 1)).item(),
        **{f"reward/{name}": part for name, part in zip(rollouts.component_names, parts, strict=True)},
        "groups_with_signal": len(with_signal) / len(set(groups.tolist())),
        "response_tokens": tokens.mean().item(),
        "response_tokens_max": tokens.max().item(),
        "turns": (turns.amax(dim=1) + 1).double().mean().item(),
        "truncated": truncated.double().mean().item(),
    }
    if len(age):
        figures |= {"staleness": age.mean().item(), "staleness_max": age.max().item()}
    return figures


def concatenate(parts: Sequence[Rollouts]) -> Rollouts:
    """All rows of all parts, in order; groups of different parts stay different, numbered from 0 by first occurrence.

    `metrics` are weighted by the parts' rows; one that only some parts have is averaged over those.

    Raises:
        ValueError: there are no parts, or they name different components.
    """
    if not parts:
        raise ValueError("there are no rollouts to concatenate")
    names = parts[0].component_names
    for index, part in enumerate(parts):
        if part.component_names != names:
            raise ValueError(
                f"part {index} has the reward components {part.component_names}, and part 0 has {names}; "
                f"rollouts that are trained on together come from environments that name the same ones"
            )
    width = max(part.tokens.shape[1] for part in parts)
    tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in PER_ROW}
    for name in PER_TOKEN:
        tensors[name] = torch.cat([_widen(getattr(part, name), width, PADDING.get(name, 0)) for part in parts])
    return Rollouts(
        **tensors,
        component_names=names,
        groups=_renumber(parts),
        answers=tuple(itertools.chain.from_iterable(part.answers for part in parts)),
        failures=tuple(itertools.chain.from_iterable(part.failures for part in parts)),
        metrics=_average(parts),
    )


def _widen(tensor: Tensor, width: int, padding: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=padding)


def _renumber(parts: Sequence[Rollouts]) -> Tensor:
    numbers: dict[tuple[int, int], int] = {}
    groups = [
        numbers.setdefault((index, group), len(numbers))
        for index, part in enumerate(parts)
        for group in part.groups.tolist()
    ]
    return torch.tensor(groups, dtype=torch.int64)


def _average(parts: Sequence[Rollouts]) -> dict[str, float]:
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            total, rows = totals.get(name, (0.0, 0))
            totals[name] = (total + value * len(part), rows + len(part))
    return {name: total / rows for name, (total, rows) in totals.items() if rows}
