"""Estimates of KL(policy || reference) from the tokens that were sampled, one number a token.

    d  = logp_ref - logp
    k1 = -d                 unbiased; may be negative
    k2 = d^2 / 2            biased; its gradient is that of the KL
    k3 = e^d - d - 1 >= 0   unbiased, low variance; its gradient is that of KL(reference || policy)

Schulman, "Approximating KL divergence" (2020). What an estimate is worth depends on where it stands. In the reward,
detached, k1 gives the gradient of the KL. In the loss, on-policy, k1 gives 0 in expectation, k2 the gradient of the KL,
k3 that of the other direction (as in GRPO, arXiv:2402.03300), and `k3_unbiased` = rho k3, with rho the importance ratio
and its gradient, again that of the KL (DeepSeek-V3.2; TRL's `use_bias_correction_kl`). Where rho is that of an answer
(`ratio.level="sequence"`), the weight is the geometric mean over the answer, and no longer unbiased.

Implementations bound them differently. verl's k3 and all of NeMo-RL's hold d within 20 and the estimate within 10 of 0:
a token beyond has no gradient, that is one which the reference rules out. TRL bounds nothing. Here only e^d is bounded,
in k3 at d = 20, where the policy sampled what it all but rules out; a token that the reference rules out costs -d - 1.

Axes: any.
"""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "KLEstimator", "kl_estimate"]

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "k3_unbiased"]

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probabilities are held within it before they are exponentiated to a ratio, as in verl and NeMo-RL:
e^20 is still a float, and says the same. Beyond it there is no gradient. A KL is held only above; see there."""


def kl_estimate(
    logp: Float[Tensor, "*axes"],
    logp_ref: Float[Tensor, "*axes"],
    *,
    estimator: KLEstimator,
    ratio: Float[Tensor, "*axes"] | None = None,
) -> Float[Tensor, "*axes"]:
    """The estimate of each token, in nats; differentiable in `logp`.

    Args:
        logp: the policy's, of sampled tokens.
        logp_ref: the reference's.
        estimator: see above.
        ratio: importance ratio of each token, for `"k3_unbiased"`; where it is None, that of the policy over itself:
            1, with the gradient of `logp`.
    """
    difference = logp_ref.detach() - logp
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    difference = difference.clamp(max=LOG_RATIO_LIMIT)
    k3 = difference.expm1() - difference
    if estimator == "k3":
        return k3
    return (torch.exp(logp - logp.detach()) if ratio is None else ratio) * k3
