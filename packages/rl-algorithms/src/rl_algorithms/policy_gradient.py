"""The policy-gradient loss, whole: from log-probabilities and advantages to a scalar and its metrics.

    rho  = exp(logp - logp_proximal)                  importance ratio, of a token or an answer      losses
    l    = surrogate(rho, A)                          clip, CISPO or REINFORCE, dual clip            losses
    l   *= f(exp(logp_proximal - logp_old))           correction of the sampler's mismatch           corrections
    l   += beta KL(logp, logp_ref)                                                               kl
    L    = sum_t weight[t] l[t] - eta sum_t H[t] / N  weight sums to the mode's mean over the step   aggregation

H is the policy's entropy, N the step's trainable tokens. Every line is a pure function of the modules named. Tokens off
the mask count nothing, whatever stands in their place, NaN included, and all that is divided by is counted over the
whole step, so no cut of it into microbatches, ranks or packs changes the sum of the parts.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import corrections, losses
from rl_algorithms.aggregation import Counts, token_weights
from rl_algorithms.contracts import Sums
from rl_algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from rl_algorithms.objective import Objective, RatioConfig

__all__ = ["Examples", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Rollouts made ready for the loss. What an objective does not need is NaN."""

    rows_per_unit: ClassVar[int] = 1

    tokens: Int[Tensor, "B T"]
    """Right-padded."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    trainable: Bool[Tensor, "B T"]
    """Tokens that the policy chose and is trained on."""

    advantage: Float[Tensor, "B T"]
    """Of each token; the same for all of an answer, unless it comes from a value function."""

    logp_old: Float[Tensor, "B T"]
    """The sampler's."""

    logp_proximal: Float[Tensor, "B T"]
    """The policy's own when the batch was begun; needed where `ratio.proximal` is `recomputed`."""

    logp_ref: Float[Tensor, "B T"]
    """The reference's; needed for a KL, and to report it."""


def loss(output: Tensor, examples: Examples, *, objective: Objective, counts: Counts) -> tuple[Tensor, Sums]:
    """The part of the step's loss that these rows contribute, and sums of their metrics over tokens.

    Args:
        output: log-probabilities [B, T], or stacked with entropies [B, T, 2] where the objective has an entropy bonus.
        examples: rows of the step, each whole.
        objective: what is minimised.
        counts: of the whole step.
    """
    mask = examples.trainable
    logp, entropy = (output, None) if output.ndim == 2 else output.unbind(-1)
    logp = torch.where(mask, logp, 0.0)
    logp_old = torch.where(mask, examples.logp_old.to(logp.dtype), 0.0)
    logp_proximal = _proximal(logp, logp_old, examples, config=objective.ratio)
    advantage = torch.where(mask, examples.advantage.to(logp.dtype), 0.0)
    ratio = losses.importance_ratio(logp, logp_proximal, mask, level=objective.ratio.level)
    per_token, clipped = _surrogate(logp, ratio, advantage, config=objective.ratio)
    sums = _metrics(logp, logp_old, mask, ratio=ratio, clipped=clipped)
    if objective.correction.active:
        weight = corrections.token_factors(logp_proximal, logp_old, mask, config=objective.correction)
        per_token = torch.where(weight == 0, 0.0, per_token * weight)  # what is rejected may be infinite
        sums |= _correction_metrics(weight, mask)
    if objective.kl.weight > 0:
        logp_ref = torch.where(mask, examples.logp_ref.to(logp.dtype), 0.0)
        if objective.kl.place == "loss":
            kl = kl_estimate(logp, logp_ref, estimator=objective.kl.estimator, ratio=ratio)
            per_token = per_token + objective.kl.weight * kl
        sums["kl_reference"] = kl_estimate(logp.detach(), logp_ref, estimator="k3").sum()  # both are 0 off the mask
    weights = token_weights(mask, objective.aggregation, counts, max_length=objective.max_length).to(logp.dtype)
    total = (weights * torch.where(mask, per_token, 0.0)).sum()
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0).sum()
        total = total - objective.entropy_weight * entropy / max(counts.tokens, 1)
        sums["entropy"] = entropy.detach()
    return total, {"loss": total.detach(), **sums}


def _proximal(logp: Tensor, logp_old: Tensor, examples: Examples, *, config: RatioConfig) -> Tensor:
    if config.proximal == "sampler":
        return logp_old
    if config.proximal == "current":
        return logp.detach()
    return torch.where(examples.trainable, examples.logp_proximal.to(logp.dtype), 0.0)


def _surrogate(logp: Tensor, ratio: Tensor, advantage: Tensor, *, config: RatioConfig) -> tuple[Tensor, Tensor]:
    if config.surrogate == "reinforce":
        return losses.reinforce(logp, advantage), torch.zeros_like(logp, dtype=torch.bool)
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    if config.surrogate == "cispo":
        return losses.cispo(logp, ratio, advantage, **bounds)
    per_token, clipped = losses.clipped_surrogate(ratio, advantage, **bounds)
    if config.dual_clip is None:
        return per_token, clipped
    per_token, bound = losses.dual_clip(per_token, advantage, limit=config.dual_clip)
    return per_token, clipped | bound


@torch.no_grad()
def _metrics(logp: Tensor, logp_old: Tensor, mask: Tensor, *, ratio: Tensor, clipped: Tensor) -> Sums:
    gap = torch.where(mask, logp_old - logp, 0.0)
    return {
        "clip_fraction": (clipped & mask).sum(),
        "ratio": torch.where(mask, ratio, 0.0).sum(),
        "kl_engine": gap.sum(),  # k1 estimate of KL(sampler || trainer)
        "token_mult_prob_error": torch.where(mask, gap.abs().clamp(max=LOG_RATIO_LIMIT).exp(), 0.0).sum(),
        "entropy": -torch.where(mask, logp_old, 0.0).sum(),  # of the sampler: the mean of -logp over its own samples
    }


def _correction_metrics(weight: Tensor, mask: Tensor) -> Sums:
    weight = torch.where(mask, weight, 0.0)
    return {
        "importance_weight": weight.sum(),
        "importance_weight_squared": weight.square().sum(),
        "rejected_fraction": ((weight == 0) & mask).sum(),
    }
