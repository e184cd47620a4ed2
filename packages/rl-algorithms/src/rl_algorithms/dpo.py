"""Direct Preference Optimization, whole: make chosen answers likelier than rejected ones.

    delta = (logp_c - logp_ref_c) - (logp_r - logp_ref_r)            sums over each answer's tokens
    L     = mean over pairs of -log sigmoid(beta delta)  +  alpha * NLL(chosen) / chosen tokens

Both means are over the whole optimizer step. The first term may be another of `preferences.losses`: some want means
per token, one no reference. The reference, commonly the policy as it was when training began, is asked once, before the
first step: no second model is kept. The default is plain DPO, alpha = 0: both answers' log-probabilities may then sink
while the margin grows, and on the quickstart's task accuracy does; with alpha = 1 it does not. RPO divides each NLL by
its own answer's length, and NeMo-RL by default by nothing; here it is a mean over the step's tokens, as in SFT.

Axes: B = 2 * pairs rows, chosen then rejected; T tokens.
References: DPO (arXiv:2305.18290, eq. 7), the NLL term of RPO (arXiv:2404.19733, eq. 2).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import offline
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Policy, Sums
from rl_algorithms.preferences.answers import answer_logp, match_ranks, with_reference
from rl_algorithms.preferences.losses import SORTED, PairLossConfig, formula, known_reference, pair_delta, pair_loss
from rl_algorithms.preferences.pairs import Pair, pad_pairs, require_answers

__all__ = ["DPOConfig", "Examples", "explain", "margins", "prepare", "step", "train", "with_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig(PairLossConfig):
    """What a DPO run may choose, beside `loss`, `beta`, `label_smoothing` and `gamma`."""

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 64
    """Pairs in each step, over all ranks."""

    nll_weight: float = 0.0
    """Alpha, of the chosen answers' NLL, which keeps them likely while the margin grows. 0 is DPO as published."""

    num_prompts: int = 512
    """Prompts that pairs are made from: of the whole run, or online of each step."""

    num_generations_per_prompt: int = 8
    """Answers sampled to each of those prompts; right ones become chosen, wrong ones rejected."""

    pairs_per_prompt: int = 2
    """At most so many pairs from one prompt."""

    max_turns: int = 1
    """Answers in one conversation at most, where the environment goes on after the first."""

    max_length: int | None = None
    """Tokens that a conversation may have before it is answered again. Null is no bound but the engine's context."""

    def __post_init__(self) -> None:
        PairLossConfig.__post_init__(self)
        counts = dict.fromkeys(("max_num_steps", "batch_size", "num_prompts", "pairs_per_prompt", "max_turns"), 1)
        least = {**counts, "num_generations_per_prompt": 2, "max_length": 2, "nll_weight": 0}  # a pair is two answers
        check_fields(self, at_least=least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Pairs made ready for the loss: rows 2i chosen, 2i + 1 rejected."""

    rows_per_unit: ClassVar[int] = 2
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    logp_ref: Float[Tensor, " B"]
    """Log-probability of each answer under the reference, summed over its tokens; NaN while it is unknown."""


def explain(config: DPOConfig) -> str:
    """The formula that the configuration amounts to."""
    pair, delta = formula(config).split("\n")
    nll = f" + {config.nll_weight:g} * NLL(chosen) / the step's chosen tokens" if config.nll_weight else ""
    return f"L = mean over the step's pairs of [{pair}]{nll}\n{delta}"


def train(
    *, policy: Policy, examples: Examples, config: DPOConfig, version: int = 0, steps_taken: int = 0, seed: int = 0
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    `examples` went through `prepare` and, if the loss compares with a reference, `with_reference`. To go on with a run,
    give the same ones and the `steps_taken` so far.
    """
    drawn = offline.draw_batches(examples, config=config, steps_taken=steps_taken, seed=seed)
    train_on = functools.partial(step, policy, config=config)
    return offline.train(train_on, drawn, config=config, version=version, steps_taken=steps_taken)


def prepare(pairs: Sequence[Pair]) -> Examples:
    """Pad to one width; only the answers are trainable. The reference's log-probabilities are still unknown: NaN."""
    padded = pad_pairs(pairs)
    unknown = torch.full((len(padded.tokens),), torch.nan)
    return Examples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer, logp_ref=unknown)


def step(policy: Policy, examples: Examples, config: DPOConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log, as means over pairs.

    Raises:
        ValueError: an answer has no trainable token, or no log-probability under the reference where one is needed.
    """
    require_answers(examples.trainable)
    examples = replace(examples, logp_ref=known_reference(examples.logp_ref, config))
    if config.loss in SORTED:
        examples = match_ranks(examples, policy.logp(examples), paired=config.loss == "aot")
    num_pairs, num_tokens = len(examples.tokens) // 2, int(examples.trainable[0::2].sum())
    loss = functools.partial(_loss, config=config, num_pairs=num_pairs, num_chosen_tokens=num_tokens)
    metrics = offline.take_step(policy, examples, loss, mean_over=num_pairs, divisors={"nll": num_tokens})
    return {**metrics, "trained_tokens": examples.trainable.sum().item()}


def margins(policy: Policy, examples: Examples, config: DPOConfig) -> dict[str, float]:
    """The margin `beta * delta` and the share of pairs on the right side of it, without training on them."""
    logratio = answer_logp(policy.logp(examples), examples.trainable) - known_reference(examples.logp_ref, config)
    delta = pair_delta(logratio, examples.trainable, config)
    return {"margin": (config.beta * delta).mean().item(), "pair_accuracy": (delta > 0).float().mean().item()}


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: DPOConfig, num_pairs: int, num_chosen_tokens: int
) -> tuple[Float[Tensor, ""], Sums]:
    logp_answer = answer_logp(logp, examples.trainable)
    logratio = logp_answer - examples.logp_ref
    delta = pair_delta(logratio, examples.trainable, config)
    pairs = pair_loss(delta, config, chosen=logratio[0::2], rejected=logratio[1::2])
    loss, nll = pairs.sum() / num_pairs, -logp_answer[0::2].sum()
    if config.nll_weight:
        loss = loss + config.nll_weight * nll / num_chosen_tokens
    sums = {"loss": loss, "nll": nll, "margin": config.beta * delta.sum(), "pair_accuracy": (delta > 0).float().sum()}
    sums |= {"chosen_logratio": logratio[0::2].sum(), "rejected_logratio": logratio[1::2].sum()}
    return loss, {name: total.detach() for name, total in sums.items()}
