"""Odds Ratio Preference Optimization, whole: imitate chosen answers, and keep rejected ones less likely. No reference.

    m    = mean of logp over an answer's tokens
    odds = exp(m) / (1 - exp(m)),   log odds = m - log(1 - exp(m))
    L    = NLL(chosen) / chosen tokens  +  lambda * mean over pairs of -log sigmoid(log odds_c - log odds_r)

Both means are over the whole optimizer step. As m nears 0 an answer becomes certain and its odds infinite; m is held
below -1e-6, so that the loss and its gradient stay finite, and there no gradient flows through the odds. The NLL is
over answers only, each token counting the same; TRL takes it over prompts too, and over each microbatch by itself.

Axes: B = 2 * pairs rows, chosen then rejected; T tokens.
Reference: ORPO (arXiv:2403.07691, eq. 4 to 7).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import offline
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Policy, Sums
from rl_algorithms.preferences.answers import answer_logp
from rl_algorithms.preferences.losses import sigmoid
from rl_algorithms.preferences.pairs import Pair, pad_pairs, require_answers

__all__ = ["Examples", "ORPOConfig", "explain", "log1mexp", "log_odds", "prepare", "step", "train"]

CERTAIN = -1e-6
"""A mean log-probability that counts as certainty. In float32 1 - exp(m) still has four digits there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPOConfig:
    """What an ORPO run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 64
    """Pairs in each step, over all ranks."""

    odds_ratio_weight: float = 0.1
    """Lambda, TRL's `beta`: what the odds ratio counts beside imitation. Higher separates answers further; 0 is SFT on
    the chosen ones."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"odds_ratio_weight": 0, "max_num_steps": 1, "batch_size": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Pairs made ready for the loss: rows 2i chosen, 2i + 1 rejected."""

    rows_per_unit: ClassVar[int] = 2
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]


def explain(config: ORPOConfig) -> str:
    """The formula that the configuration amounts to."""
    return (
        f"L = NLL(chosen) / the step's chosen tokens + {config.odds_ratio_weight:g} * mean over the step's pairs of "
        f"-log sigmoid(log odds(chosen) - log odds(rejected))\n"
        f"log odds = m - log(1 - exp(m)), m = mean of logp over the answer's tokens"
    )


def train(
    *, policy: Policy, examples: Examples, config: ORPOConfig, version: int = 0, steps_taken: int = 0, seed: int = 0
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    To go on with a run, give the same examples and the `steps_taken` so far.
    """
    drawn = offline.draw_batches(examples, config=config, steps_taken=steps_taken, seed=seed)
    train_on = functools.partial(step, policy, config=config)
    return offline.train(train_on, drawn, config=config, version=version, steps_taken=steps_taken)


def prepare(pairs: Sequence[Pair]) -> Examples:
    """Pad to one width; only the answers are trainable."""
    padded = pad_pairs(pairs)
    return Examples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer)


def step(policy: Policy, examples: Examples, config: ORPOConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log, as means over pairs.

    Raises:
        ValueError: an answer has no trainable token.
    """
    require_answers(examples.trainable)
    num_pairs, num_tokens = len(examples.tokens) // 2, int(examples.trainable[0::2].sum())
    loss = functools.partial(_loss, config=config, num_pairs=num_pairs, num_chosen_tokens=num_tokens)
    metrics = offline.take_step(policy, examples, loss, mean_over=num_pairs, divisors={"nll": num_tokens})
    return {**metrics, "trained_tokens": examples.trainable.sum().item()}


def log1mexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log(1 - exp(x)) of x < 0 without cancellation near 0. Of x far below 0 only the absolute error is small.

    >>> log1mexp(torch.tensor([-1e-6, -50.0])).round(decimals=3)
    tensor([-13.8160,   0.0000])
    """
    return torch.log(-torch.expm1(x))


def log_odds(logp_mean: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Of an answer with this mean log-probability per token; at certainty finite, and without gradient."""
    held = logp_mean.clamp(max=CERTAIN)
    return held - log1mexp(held)


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: ORPOConfig, num_pairs: int, num_chosen_tokens: int
) -> tuple[Float[Tensor, ""], Sums]:
    logp_answer = answer_logp(logp, examples.trainable)
    odds = log_odds(logp_answer / examples.trainable.sum(dim=1))
    ratio = odds[0::2] - odds[1::2]
    nll, separation = -logp_answer[0::2].sum(), sigmoid(ratio, beta=1.0).sum()
    loss = nll / num_chosen_tokens
    if config.odds_ratio_weight:
        loss = loss + config.odds_ratio_weight * separation / num_pairs
    sums = {"loss": loss, "nll": nll, "odds_ratio_loss": separation, "log_odds_ratio": ratio.sum()}
    sums["pair_accuracy"] = (ratio > 0).float().sum()
    return loss, {name: total.detach() for name, total in sums.items()}
