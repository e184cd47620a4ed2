"""Direct Preference Optimization, whole: make chosen answers likelier than rejected ones.

    delta = (logp_c - logp_ref_c) - (logp_r - logp_ref_r)            sums over each answer's tokens
    L     = mean over pairs of -log sigmoid(beta delta)  +  alpha * NLL(chosen) / chosen tokens

Both means are over the whole optimizer step. The reference is the policy as it was when training began; its
log-probabilities are computed once, before the first step, and no second model is kept. Without the NLL term both
answers' log-probabilities may sink together while the margin grows: on the quickstart's task plain DPO lowers accuracy.

Axes: B = 2 * pairs rows, chosen then rejected; T tokens.
References: DPO (arXiv:2305.18290, eq. 7), the NLL term of RPO (arXiv:2404.19733, eq. 2).
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_algorithms.contracts import Policy, Sums
from rl_algorithms.data import batches
from rl_algorithms.padding import pad, take_rows
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import Rollouts

__all__ = [
    "DPOConfig",
    "Examples",
    "Pair",
    "margins",
    "pairs_from_rollouts",
    "prepare",
    "step",
    "train",
    "with_reference",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig:
    """What a DPO run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 64
    """Pairs in each step, over all ranks."""

    beta: float = 0.1
    """How strongly the policy is held to the reference: higher stays closer for the same margin."""

    nll_weight: float = 1.0
    """Weight of the chosen answers' negative log-likelihood, which keeps them likely while the margin grows."""

    num_prompts: int = 512
    """Prompts that pairs are made from."""

    num_generations_per_prompt: int = 8
    """Answers sampled to each of those prompts; right ones become chosen, wrong ones rejected."""

    pairs_per_prompt: int = 2
    """At most so many pairs from one prompt."""

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ValueError(f"beta={self.beta} must be > 0")
        if not self.nll_weight >= 0.0:
            raise ValueError(f"nll_weight={self.nll_weight} must be >= 0")
        for name in ("max_num_steps", "batch_size", "num_prompts", "pairs_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if self.num_generations_per_prompt < 2:
            raise ValueError(
                f"num_generations_per_prompt={self.num_generations_per_prompt} must be >= 2: a pair is two answers"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt, prompt included."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Pairs made ready for the loss: rows 2i chosen, 2i + 1 rejected."""

    rows_per_unit: ClassVar[int] = 2
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    logp_ref: Float[Tensor, " B"]
    """Log-probability of each answer under the reference, summed over its tokens."""


def train(
    *,
    policy: Policy,
    examples: Examples,
    config: DPOConfig,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    `examples` are pairs that went through `prepare` and, before the first step, through `with_reference`. To go on with
    a run, give the same ones and the `steps_taken` so far.
    """
    timer = PhaseTimer()
    pairs = range(len(examples.tokens) // 2)
    for drawn in itertools.islice(batches(pairs, size=config.batch_size, seed=seed), steps_taken, config.max_num_steps):
        with timer.phase("train"):
            rows = torch.tensor([row for pair in drawn for row in (2 * pair, 2 * pair + 1)])
            metrics = step(policy, take_rows(examples, rows), config)
        version += 1
        yield {**metrics, "version": version, **timer.lap()}


def pairs_from_rollouts(rollouts: Rollouts, *, pairs_per_prompt: int) -> list[Pair]:
    """Pair the best-rewarded answers of each group with the worst; groups whose rewards are all equal give none."""
    pairs: list[Pair] = []
    group_size = rollouts.rewards.shape[1]
    for index, rewards in enumerate(rollouts.rewards):
        best, worst = rewards.max(), rewards.min()
        if best == worst:
            continue
        chosen, rejected = ((rewards == value).nonzero()[:, 0] + index * group_size for value in (best, worst))
        number = min(pairs_per_prompt, max(len(chosen), len(rejected)))
        pairs += [
            _pair(rollouts, int(chosen[k % len(chosen)]), int(rejected[k % len(rejected)])) for k in range(number)
        ]
    return pairs


def prepare(pairs: Sequence[Pair]) -> Examples:
    """Pad to one width; only the answers are trainable. The reference's log-probabilities are still unknown: NaN."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    padded = pad(rows, answer_starts=[pair.prompt_length for pair in pairs for _ in range(2)])
    unknown = torch.full((len(rows),), torch.nan)
    return Examples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer, logp_ref=unknown)


def with_reference(policy: Policy, examples: Examples) -> Examples:
    """Take the policy, as it is now, for the reference."""
    return replace(examples, logp_ref=policy.logp(examples).sum(dim=1))


def step(policy: Policy, examples: Examples, config: DPOConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log, as means over pairs."""
    num_pairs = len(examples.tokens) // 2
    num_chosen_tokens = examples.trainable[0::2].sum()
    loss = functools.partial(_loss, config=config, num_pairs=num_pairs, num_chosen_tokens=num_chosen_tokens)
    sums = policy.forward_backward(examples, loss)
    grad_norm = policy.optim_step()
    nll = (sums.pop("nll") / num_chosen_tokens).item()
    means = {name: (total / num_pairs).item() for name, total in sums.items()}
    means["loss"] += config.nll_weight * nll
    return {**means, "nll": nll, "grad_norm": grad_norm, "trained_tokens": examples.trainable.sum().item()}


def margins(policy: Policy, examples: Examples, *, beta: float) -> dict[str, float]:
    """The margin `beta * delta` and the share of pairs on the right side of it, without training on them."""
    delta = _delta(policy.logp(examples).sum(dim=1) - examples.logp_ref)
    return {"margin": (beta * delta).mean().item(), "pair_accuracy": (delta > 0).float().mean().item()}


def _loss(
    logp: Float[Tensor, "B T"],
    examples: Examples,
    *,
    config: DPOConfig,
    num_pairs: int,
    num_chosen_tokens: Int[Tensor, ""],
) -> tuple[Float[Tensor, ""], Sums]:
    logp_answer = torch.where(examples.trainable, logp, 0.0).sum(dim=1)
    logratio = logp_answer - examples.logp_ref
    preference = -logsigmoid(config.beta * _delta(logratio)).sum()
    nll = -logp_answer[0::2].sum()
    loss = preference / num_pairs + config.nll_weight * nll / num_chosen_tokens
    with torch.no_grad():
        sums = {
            "loss": preference.detach(),
            "nll": nll.detach(),
            "margin": (config.beta * _delta(logratio)).sum(),
            "pair_accuracy": (_delta(logratio) > 0).float().sum(),
            "chosen_logratio": logratio[0::2].sum(),
            "rejected_logratio": logratio[1::2].sum(),
        }
    return loss, sums


def _delta(logratio: Float[Tensor, " B"]) -> Float[Tensor, " pairs"]:
    return logratio[0::2] - logratio[1::2]


def _pair(rollouts: Rollouts, chosen: int, rejected: int) -> Pair:
    def row(index: int) -> tuple[int, ...]:
        return tuple(rollouts.tokens[index, : rollouts.lengths[index]].tolist())

    return Pair(chosen=row(chosen), rejected=row(rejected), prompt_length=int(rollouts.response[chosen].int().argmax()))
