"""PG

    token-mean                 sum_i sum_t l[i,t] / N_tok                            DAPO; every token counts the same
    seq-mean-token-mean        sum_i (sum_t l[i,t] / T_i) / N_seq                    GRPO, GSPO; every answer the same
    seq-mean-token-sum         sum_i sum_t l[i,t] / N_seq                            RLOO, REINFORCE
    seq-mean-token-sum-norm    sum_i sum_t l[i,t] / (N_seq L)                        Dr.GRPO; L a constant of the run

N_tok and N_seq count the trainable tokens, and the rows that have any, of the whole optimizer step, over every
microbatch and every rank. Parts of a step then add up to it, however it was cut. Names are verl's.

Where others differ: for `grpo` and `dr_grpo` TRL divides by all rows, those without a trainable token (masked as cut
off) included, and its L is `max_completion_length`; verl's L is `loss_scale_factor`, or the padded width of the batch
where that is not set, in old versions always. Here L is asked for.

Axes: B rows, T tokens.

    rho  = exp(logp - logp_proximal)                  importance ratio, of a token or an answer      losses
    l    = surrogate(rho, A)                          clip, CISPO or REINFORCE, dual clip            losses
    l   *= f(exp(logp_proximal - logp_old))           correction of the sampler's mismatch           corrections
    l   += beta KL(logp, logp_ref)                                                               kl
    L    = sum_t weight[t] l[t] - eta sum_t H[t] / N  weight sums to the mode's mean over the step   aggregation

H is the policy's entropy, N the step's trainable tokens. Every line is a pure function of the modules named. Tokens off
the mask count nothing, whatever stands in their place, NaN included, and all that is divided by is counted over the
whole step, so no cut of it into microbatches, ranks or packs changes the sum of the parts.

Axes: B rows, T tokens.

    rho = exp(logp - logp_proximal)                                  importance ratio, of a token or of a whole answer
    REINFORCE   -A logp                                              Williams 1992
    clip        -min(rho A, clip(rho, 1 - low, 1 + high) A)          PPO, arXiv:1707.06347 eq. 7; high > low in DAPO
    dual clip   where A < 0: min(of the above, -c A)                 arXiv:1912.09729 eq. 5
    CISPO       -sg(clip(rho, 1 - low, 1 + high)) A logp             MiniMax-M1, arXiv:2506.13585 eq. 4-5

sg stops the gradient. A clipped token of PPO has no gradient; one of CISPO keeps its own, at the bounded weight.
`aggregation` says how the numbers become one.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import corrections
from rl_algorithms.contracts import Sums
from rl_algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from rl_algorithms.objective import Aggregation, Objective, RatioConfig, RatioLevel

__all__ = [
    "Counts",
    "Examples",
    "cispo",
    "clipped_surrogate",
    "dual_clip",
    "importance_ratio",
    "loss",
    "reinforce",
    "token_weights",
    "value_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a whole optimizer step is divided by."""

    tokens: int
    """Trainable tokens."""

    sequences: int
    """Rows with at least one trainable token."""

    @classmethod
    def of(cls, trainable: Bool[Tensor, "B T"]) -> "Counts":
        """Those of a step whose rows are all in `trainable`."""
        return cls(tokens=int(trainable.sum()), sequences=int(trainable.any(dim=1).sum()))


def token_weights(
    mask: Bool[Tensor, "B T"], aggregation: Aggregation, counts: Counts, *, max_length: int | None = None
) -> Float[Tensor, "B T"]:
    """What each token of some rows of a step weighs in its loss; float64, 0 off the mask. No row, no weight, no NaN.

    Args:
        mask: the trainable tokens of these rows, each row whole.
        aggregation: see above.
        counts: of the whole step.
        max_length: L of `"seq-mean-token-sum-norm"`, in tokens; the longest answer that the run allows.

    Raises:
        ValueError: `max_length` is missing where it is needed.
    """
    tokens, sequences = max(counts.tokens, 1), max(counts.sequences, 1)
    weights = mask.double()
    if aggregation == "token-mean":
        return weights / tokens
    if aggregation == "seq-mean-token-mean":
        return weights / mask.sum(dim=1, keepdim=True).clamp(min=1) / sequences
    if aggregation == "seq-mean-token-sum":
        return weights / sequences
    if max_length is None:
        raise ValueError(
            "aggregation='seq-mean-token-sum-norm' divides by a constant length and max_length is None; "
            "set it to the longest answer that the run allows, in tokens"
        )
    return weights / (sequences * max_length)


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


def importance_ratio(
    logp: Float[Tensor, "B T"],
    logp_proximal: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: RatioLevel,
) -> Float[Tensor, "B T"]:
    """How much likelier a token, or a row, is now than under the proximal policy; 1 off the mask.

    `"sequence"` is GSPO's (arXiv:2507.18071 eq. 7): s, the geometric mean over the row's trainable tokens, the same for
    each of them. It is length-normalised, unlike the plain product of RLOO in TRL. Its gradient is taken as in eq. 14,
    sg(s) exp(logp - sg(logp)): each token has its own, so that one of advantage or weight 0 has none. Where these are
    the row's, the sum over its tokens is that of eq. 5.
    """
    log_ratio = torch.where(mask, logp - logp_proximal, 0.0)
    if level == "token":
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    mean = log_ratio.detach().sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    held = torch.where(mask, mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    return held.exp() * (log_ratio - log_ratio.detach()).exp()


def reinforce(logp: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The score-function loss. Unbiased on-policy only; `corrections` has what off-policy tokens need."""
    return -advantage * logp


def clipped_surrogate(
    ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], *, clip_low: float, clip_high: float
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """PPO's pessimistic objective, negated, and where the clip was what bound: there the gradient is 0."""
    free = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return -torch.minimum(free, clipped), clipped < free


def dual_clip(
    loss: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], *, limit: float
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Bound `clipped_surrogate`'s loss where the advantage is negative, and say where it did.

    Without it a bad token that has become likely weighs rho without bound. `limit` is the c of the paper: the ratio
    beyond which nothing grows any more; > 1.
    """
    bound = (advantage < 0) & (loss > -limit * advantage)
    return torch.where(bound, -limit * advantage, loss), bound


def cispo(
    logp: Float[Tensor, "B T"],
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """REINFORCE weighed by the clipped ratio, and where it was clipped.

    `clip_high` is what is added to 1, as in the paper, verl and NeMo-RL; TRL's `epsilon_high` is the bound itself.
    The paper has no lower bound: `clip_low=1`.
    """
    weight = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantage * logp, weight != ratio.detach()


def value_loss(
    values: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    values_old: Float[Tensor, "B T"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Half the squared error of the value function, and where its clip was what bound (arXiv:1707.06347, PPO2's code).

        max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2

    `clip` None leaves it out. The half is that of verl, NeMo-RL and TRL.
    """
    error = (values - returns).square()
    if clip is None:
        return error / 2, torch.zeros_like(error, dtype=torch.bool)
    moved = values_old + (values - values_old).clamp(-clip, clip)
    held = (moved - returns).square()
    return torch.maximum(error, held) / 2, held > error
