"""Losses of a token, and the weight of each token in the loss of a step: what `policy_gradient` composes.

    rho = exp(logp - logp_proximal)                                  importance ratio, of a token or of a whole answer
    REINFORCE   -A logp                                              Williams 1992
    clip        -min(rho A, clip(rho, 1 - low, 1 + high) A)          PPO, arXiv:1707.06347 eq. 7; high > low in DAPO
    dual clip   where A < 0: min(of the above, -c A)                 arXiv:1912.09729 eq. 5
    CISPO       -sg(clip(rho, 1 - low, 1 + high)) A logp             MiniMax-M1, arXiv:2506.13585 eq. 4-5

sg stops the gradient. A clipped token of PPO has no gradient; one of CISPO keeps its own, at the bounded weight.
A step's loss is the sum of its tokens' losses times `token_weights`:

    token-mean                 sum_i sum_t l[i,t] / N_tok                            DAPO; every token counts the same
    seq-mean-token-mean        sum_i (sum_t l[i,t] / T_i) / N_seq                    GRPO, GSPO; every response the same
    seq-mean-token-sum         sum_i sum_t l[i,t] / N_seq                            RLOO, REINFORCE
    seq-mean-token-sum-norm    sum_i sum_t l[i,t] / (N_seq L)                        Dr.GRPO; L a constant of the run

N_tok and N_seq count the trainable tokens, and the rows that have any, of the whole optimizer step, over every
microbatch and every rank. The parts of a step then add up to the same loss, however it was cut. The names are verl's.

Other libraries differ: for `grpo` and `dr_grpo` TRL divides by all rows, those without a trainable token (masked as
truncated) included, and its L is `max_completion_length`; verl's L is `loss_scale_factor`, or the padded width of the
batch where that is not set, and in old versions always. Here L has to be given.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.kl import LOG_RATIO_LIMIT
from rl_algorithms.objective import Aggregation, RatioLevel

__all__ = [
    "Counts",
    "cispo",
    "clipped_surrogate",
    "dual_clip",
    "importance_ratio",
    "reinforce",
    "token_weights",
    "value_loss",
]


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
