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
`kl.log_ratio_limit=20` and `kl.limit=10` bound an objective's KL as they do.

Axes: any.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rl_algorithms.pieces import PieceName, find, piece

__all__ = ["LOG_RATIO_LIMIT", "k1", "k2", "k3", "k3_unbiased", "kl_estimate"]

LOG_RATIO_LIMIT = 20.0
"""Differences of log-probabilities are held within it before they are exponentiated to a ratio, as in verl and NeMo-RL:
e^20 is still a float, and says the same. Beyond it there is no gradient. A KL is held only above; see there."""

SCHULMAN = "Schulman, Approximating KL divergence, 2020"


@piece("kl", formula="(logp - logp_ref)", source=SCHULMAN)
def k1(logp: Float[Tensor, "*axes"], logp_ref: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Unbiased; may be negative."""
    return -(logp_ref.detach() - logp)


@piece("kl", formula="(logp - logp_ref)^2 / 2", source=SCHULMAN)
def k2(logp: Float[Tensor, "*axes"], logp_ref: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Biased; its gradient is that of the KL."""
    return (logp_ref.detach() - logp).square() / 2


@piece("kl", formula="(exp(logp_ref - logp) - (logp_ref - logp) - 1)", source=SCHULMAN)
def k3(logp: Float[Tensor, "*axes"], logp_ref: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Unbiased, never negative, of low variance; its gradient is that of KL(reference || policy)."""
    difference = (logp_ref.detach() - logp).clamp(max=LOG_RATIO_LIMIT)
    return difference.expm1() - difference


@piece("kl", formula="rho (exp(logp_ref - logp) - (logp_ref - logp) - 1)", source="DeepSeek-V3.2, arXiv:2512.02556")
def k3_unbiased(
    logp: Float[Tensor, "*axes"], logp_ref: Float[Tensor, "*axes"], ratio: Float[Tensor, "*axes"] | None
) -> Float[Tensor, "*axes"]:
    """`k3` times the importance ratio; None is that of the policy over itself: 1, with the gradient of `logp`."""
    return (torch.exp(logp - logp.detach()) if ratio is None else ratio) * k3(logp, logp_ref)


def kl_estimate(
    logp: Float[Tensor, "*axes"],
    logp_ref: Float[Tensor, "*axes"],
    *,
    estimator: PieceName,
    ratio: Float[Tensor, "*axes"] | None = None,
) -> Float[Tensor, "*axes"]:
    """The estimate of each token, in nats; differentiable in `logp`.

    Args:
        logp: the policy's, of sampled tokens.
        logp_ref: the reference's.
        estimator: see above; the name of one, or a function of yours.
        ratio: importance ratio of each token, for `"k3_unbiased"`; see there for None.
    """
    available = {"logp": logp, "logp_ref": logp_ref, "ratio": ratio, "mask": torch.ones_like(logp, dtype=torch.bool)}
    found: Tensor = find("kl", estimator)(available, {})
    return found
