"""Kahneman-Tversky Optimization, whole: learn from single answers that are each good or bad, without pairs.

    h_i = logp(y_i | x_i) - logp_ref(y_i | x_i)                          sums over the answer's tokens
    z   = max(0, mean_i [logp(y_j | x_i) - logp_ref(y_j | x_i)])         y_j answers another prompt; no gradient
    L   = mean_i of  lambda_D (1 - sigmoid(beta (h_i - z)))              desirable answers
                     lambda_U (1 - sigmoid(beta (z - h_i)))              undesirable ones

z says how far the policy as a whole has moved from the reference; answers gain by being better than that. Both means
are over the whole optimizer step, hence two passes: z, of the step's mismatched rows and without gradient, then L. TRL
takes z over each device's microbatch, averaged over devices, so there it depends on the cut. Here partners are chosen
once for the whole data (`labelled.mismatched`), so that the reference is asked before the first step and never again.

Axes: B rows, T tokens.
Reference: KTO (arXiv:2402.01306, section 4).
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
from rl_algorithms.preferences.answers import answer_logp, with_reference
from rl_algorithms.preferences.labelled import LabelledAnswer, pad_answers, require_both_labels

__all__ = ["Examples", "KTOConfig", "explain", "kto", "prepare", "step", "train", "with_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOConfig:
    """What a KTO run may choose. Weigh so that desirable_weight * good rows is 1 to 4/3 of undesirable_weight * bad."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 64
    """Answers in each step, over all ranks. With few of them z is mostly noise."""

    beta: float = 0.1
    """How strongly the policy is held to the reference: higher stays closer."""

    desirable_weight: float = 1.0
    """lambda_D: what a good answer counts. Raise it where good answers are few."""

    undesirable_weight: float = 1.0
    """lambda_U: what a bad answer counts. Raise it where bad answers are few."""

    def __post_init__(self) -> None:
        weights = ("beta", "desirable_weight", "undesirable_weight")
        least = {"max_num_steps": 1, "batch_size": 2}  # z is a mean over the step's rows
        check_fields(self, at_least=least, above=dict.fromkeys(weights, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Answers made ready for the loss."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    desirable: Bool[Tensor, " B"]
    logp_ref: Float[Tensor, " B"]
    """Log-probability of each answer under the reference, summed over its tokens; NaN while it is unknown."""


def explain(config: KTOConfig) -> str:
    """The formula that the configuration amounts to."""
    good, bad, beta = (f"{number:g}" for number in (config.desirable_weight, config.undesirable_weight, config.beta))
    return f"""L = mean over all rows of {good} sigmoid({beta} (z - h)) if good, {bad} sigmoid({beta} (h - z)) if bad
h = sum of (logp - logp_ref) over the answer's tokens; z = max(0, mean of h over the step's mismatched rows)"""


def train(
    *,
    policy: Policy,
    examples: Examples,
    mismatched: Examples,
    config: KTOConfig,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    Both sets of examples, of the same answers in the same order, went through `prepare`, `mismatched` through
    `labelled.mismatched` before, and through `with_reference`. To go on, give the same ones and the `steps_taken`.
    """
    require_both_labels(examples.desirable)
    drawn = [
        offline.draw_batches(each, config=config, steps_taken=steps_taken, seed=seed) for each in (examples, mismatched)
    ]

    def train_on(batch: tuple[Examples, ...]) -> dict[str, float]:
        return step(policy, batch[0], config, mismatched=batch[1])

    return offline.train(train_on, zip(*drawn, strict=True), config=config, version=version, steps_taken=steps_taken)


def prepare(answers: Sequence[LabelledAnswer]) -> Examples:
    """Pad to one width; only the answers are trainable. The reference's log-probabilities are still unknown: NaN."""
    rows, unknown = pad_answers(answers), torch.full((len(answers),), torch.nan)
    labels = torch.tensor([answer.desirable for answer in answers])
    return Examples(tokens=rows.tokens, lengths=rows.lengths, trainable=rows.answer, desirable=labels, logp_ref=unknown)


def step(policy: Policy, examples: Examples, config: KTOConfig, *, mismatched: Examples) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log.

    Raises:
        ValueError: a log-probability under the reference is not known.
    """
    if not torch.cat([examples.logp_ref, mismatched.logp_ref]).isfinite().all():
        raise ValueError("logp_ref is not known; give examples and mismatched to with_reference before the first step")
    drift = (answer_logp(policy.logp(mismatched), mismatched.trainable) - mismatched.logp_ref).mean().item()
    z, num_rows, good = max(drift, 0.0), len(examples.tokens), int(examples.desirable.sum())
    loss = functools.partial(_loss, config=config, z=z, num_rows=num_rows)
    labels = {"desirable_logratio": good, "undesirable_logratio": num_rows - good}
    metrics = offline.take_step(policy, examples, loss, mean_over=num_rows, divisors=labels)
    return {**metrics, "trained_tokens": examples.trainable.sum().item(), "kl": z}


def kto(logratio: Float[Tensor, " B"], good: Bool[Tensor, " B"], config: KTOConfig, *, z: float) -> Float[Tensor, " B"]:
    """The loss of each answer whose tokens' logp - logp_ref add up to `logratio`."""
    margin = config.beta * (logratio - z)
    weight = torch.where(good, config.desirable_weight, config.undesirable_weight)
    return weight * torch.sigmoid(torch.where(good, -margin, margin))


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: KTOConfig, z: float, num_rows: int
) -> tuple[Float[Tensor, ""], Sums]:
    good = examples.desirable
    logratio = answer_logp(logp, examples.trainable) - examples.logp_ref
    loss = kto(logratio, good, config, z=z).sum() / num_rows
    sums = {"loss": loss, "accuracy": ((logratio > z) == good).float().sum()}
    sums |= {"desirable_logratio": logratio[good].sum(), "undesirable_logratio": logratio[~good].sum()}
    return loss, {name: total.detach() for name, total in sums.items()}
