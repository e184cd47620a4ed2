"""What a policy-gradient loss is composed of: small functions, one number a token, nothing reduced.

    rho = exp(logp - logp_proximal)                                  importance ratio, of a token or of a whole answer
    REINFORCE   -A logp                                              Williams 1992
    clip        -min(rho A, clip(rho, 1 - low, 1 + high) A)          PPO, arXiv:1707.06347 eq. 7; high > low in DAPO
    dual clip   where A < 0: min(of the above, -c A)                 arXiv:1912.09729 eq. 5
    CISPO       -sg(clip(rho, 1 - low, 1 + high)) A logp             MiniMax-M1, arXiv:2506.13585 eq. 4-5

sg stops the gradient. A clipped token of PPO has no gradient; one of CISPO keeps its own, at the bounded weight.
`aggregation` says how the numbers become one.

Axes: B rows, T tokens.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.kl import LOG_RATIO_LIMIT
from rl_algorithms.objective import RatioLevel

__all__ = ["cispo", "clipped_surrogate", "dual_clip", "importance_ratio", "reinforce", "value_loss"]


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
