"""What makes up for tokens that another policy sampled than the one trained around. Nothing here has a gradient.

    w = exp(logp_proximal - logp_old)          proximal: the trainer's own log-probability when the batch was begun

The engine computes in other kernels, another precision, or holds older weights; w says by how much a token, or an
answer, should count more or less. Three things are done with it, each by its own function:

    truncate     min(max(w, low), high)         truncated importance sampling (TIS)
    mask_outside w where low <= w <= high, 0 elsewhere      masked (MIS; with a lower bound IcePop's band)
    reject       answers whose mean disagreement is too large, or with one token that the trainer all but rules out
                 (veto), count nothing at all

A weight of 0 takes a token's gradient away; it does not change what the step is divided by (as in TRL; verl's decoupled
path divides by the tokens that are left, and so weighs these more). Of whole answers, `"sequence"` is the product over
tokens, exact and of high variance; `geometric_mean` is its length-free kin. Truncated weights are biased; untruncated
ones have mean 1 under the sampler.

`off_policy_sequences` is another thing: it compares the policy as it is now with the sampler, so it also sees how far
the steps of this batch have moved, and needs no recomputed log-probabilities.

Sources: TIS (fengyao.notion.site/off-policy-rl, 2025), IcePop (Ring-1T, arXiv:2510.18855), AReaL's decoupled loss
(arXiv:2505.24298), verl's rollout correction, NeMo-RL's `seq-mask-tis` and `seq_logprob_error_threshold`,
slime's `mis.py` (geometric weight, veto), DeepSeek-V3.2 (arXiv:2512.02556 sec. 3.1: off-policy sequence masking).

Axes: B rows, T tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.choices import check_fields
from rl_algorithms.kl import LOG_RATIO_LIMIT
from rl_algorithms.pieces import Piece, PieceName, find, piece

__all__ = [
    "CorrectionConfig",
    "geometric_mean",
    "importance_weight",
    "mask_outside",
    "off_policy_sequences",
    "sequence_error",
    "token_factors",
    "truncate",
    "vetoed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """What makes up for a sampler that is not the proximal policy; see above."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    weight: PieceName = "none"
    """Weigh each token's loss by exp(logp_proximal - logp_old): of the `token`, of the whole answer (`sequence`),
    or the answer's geometric mean (`geometric`). `file.py:function` is a weight of your own; `low` and `high` bound
    it too."""

    low: float = 0.0
    """Smallest weight."""

    high: float = 2.0
    """Largest weight; `.inf` for no bound."""

    outside: Literal["truncate", "mask"] = "truncate"
    """What happens to a weight out of bounds: held at the bound (TIS), or made 0 (MIS, IcePop)."""

    geometric_low: float | None = None
    """Drop rollouts whose geometric-mean importance weight is below this value, for example 0.999; null disables it."""

    geometric_high: float | None = None
    """Answers whose typical token's weight is above it count nothing, 1.002 say; null is no bound."""

    sequence_error_threshold: float | None = None
    """Answers on which trainer and engine disagree by more, as a mean factor over tokens, count nothing; 1.05 is a
    suspicious one; null is no bound."""

    veto: float | None = None
    """Answers with a token whose weight is below this value, 1e-4 say, count nothing; null disables it."""

    off_policy_threshold: float | None = None
    """Answers of negative advantage that the policy has come to find less likely than the sampler by more than this, in
    nats a token, count nothing (DeepSeek-V3.2); 1e-4 to 1 is used; null disables it."""

    def __post_init__(self) -> None:
        check_fields(self, infinite=("high", "geometric_high"))
        if not 0.0 <= self.low < self.high:
            raise ValueError(f"low={self.low} and high={self.high} must be 0 <= low < high")
        low, high = self.geometric_low, self.geometric_high
        if (low is not None and not 0.0 <= low < 1.0) or (high is not None and not high > 1.0):
            raise ValueError(
                f"geometric_low={low} and geometric_high={high} must lie on either side of 1, the weight of an answer "
                f"that trainer and engine agree on"
            )
        if self.sequence_error_threshold is not None and not self.sequence_error_threshold > 1.0:
            raise ValueError(f"sequence_error_threshold={self.sequence_error_threshold} must be > 1, full agreement")
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise ValueError(f"veto={self.veto} must be between 0 and 1, the weight of a token that both agree on")
        if self.weight != "none":
            _ = self.piece

    @property
    def piece(self) -> Piece:
        """What weighs.

        Raises:
            ValueError: there is no such weight.
        """
        try:
            return find("weight", self.weight)
        except ValueError as error:
            raise ValueError(f"weight={self.weight!r}: {error}") from None

    @property
    def active(self) -> bool:
        """Whether it compares the proximal policy with the sampler."""
        bounds = (self.geometric_low, self.geometric_high, self.sequence_error_threshold, self.veto)
        return self.weight != "none" or any(bound is not None for bound in bounds)


def token_factors(
    logp_proximal: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    config: CorrectionConfig,
) -> Float[Tensor, "B T"]:
    """What a configuration multiplies each token's loss by; 1 where nothing is corrected, 0 for what is rejected."""
    weight = torch.ones_like(logp_old)
    if config.weight != "none":
        gap = _gap(logp_proximal, logp_old, mask)
        available = {"logp_proximal": logp_proximal.detach(), "logp_old": logp_old, "log_weight": gap, "mask": mask}
        weight = config.piece(available, {}).detach()
        bound = truncate if config.outside == "truncate" else mask_outside
        weight = bound(weight, low=config.low, high=config.high)
    if config.geometric_low is not None or config.geometric_high is not None:
        low = 0.0 if config.geometric_low is None else config.geometric_low
        high = float("inf") if config.geometric_high is None else config.geometric_high
        typical = geometric_mean(logp_proximal, logp_old, mask)
        weight = torch.where(((low <= typical) & (typical <= high))[:, None], weight, 0.0)
    if config.sequence_error_threshold is not None:
        error = sequence_error(logp_proximal, logp_old, mask)
        weight = torch.where((error <= config.sequence_error_threshold)[:, None], weight, 0.0)
    if config.veto is not None:
        weight = torch.where(vetoed(logp_proximal, logp_old, mask, veto=config.veto)[:, None], 0.0, weight)
    return weight


def importance_weight(
    logp_proximal: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: PieceName,
) -> Float[Tensor, "B T"]:
    """W of each token, of its whole row (the product over trainable tokens), or its geometric mean; 1 off the mask."""
    gap = _gap(logp_proximal, logp_old, mask)
    available = {"logp_proximal": logp_proximal, "logp_old": logp_old, "log_weight": gap, "mask": mask}
    weight: Tensor = find("weight", level)(available, {})
    return weight


@piece("weight", "token", formula="exp(logp_proximal - logp_old)", source="fengyao.notion.site/off-policy-rl, 2025")
def _token_weight(log_weight: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@piece("weight", "sequence", formula="exp(sum_t logp_proximal - logp_old)", source="verl's rollout correction")
def _sequence_weight(log_weight: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return _token_weight(torch.where(mask, log_weight.sum(dim=1, keepdim=True), 0.0))


@piece(
    "weight", "geometric", formula="exp(mean_t logp_proximal - logp_old)", source="slime's mis.py, tis_level=geometric"
)
def _geometric_weight(log_weight: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    mean = log_weight.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return _token_weight(torch.where(mask, mean, 0.0))


def truncate(weight: Float[Tensor, "*axes"], *, low: float, high: float) -> Float[Tensor, "*axes"]:
    """Hold the weights within bounds."""
    return weight.clamp(low, high)


def mask_outside(weight: Float[Tensor, "*axes"], *, low: float, high: float) -> Float[Tensor, "*axes"]:
    """0 where a weight is out of bounds; the others as they are."""
    return torch.where((low <= weight) & (weight <= high), weight, 0.0)


def geometric_mean(
    logp_proximal: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """The weight of a typical token of each row: exp of the mean of log w; 1 for a row without trainable tokens."""
    gap = _gap(logp_proximal, logp_old, mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_error(
    logp_proximal: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, " B"]:
    """How far trainer and engine disagree on each row: the mean over its tokens of exp |log w|; 1 is full agreement.

    The mean over all tokens of a step is `token_mult_prob_error`.
    """
    error = _gap(logp_proximal, logp_old, mask).abs().clamp(max=LOG_RATIO_LIMIT).exp()
    total = torch.where(mask, error, 0.0).sum(dim=1)
    return torch.where(mask.any(dim=1), total / mask.sum(dim=1).clamp(min=1), 1.0)


def vetoed(
    logp_proximal: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, veto: float
) -> Bool[Tensor, " B"]:
    """Whether a row has a token whose weight is below `veto`: the trainer all but rules out what the engine sampled.

    slime's `rs_veto_threshold`. There a rejected token also leaves the count that the loss is divided by; not here.
    """
    return (_gap(logp_proximal, logp_old, mask) < math.log(veto)).any(dim=1)


def off_policy_sequences(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    advantage: Float[Tensor, "B T"],
    threshold: float,
) -> Bool[Tensor, "B T"]:
    """Which tokens are of negative advantage, in a row that the policy finds less likely than the sampler did.

    Less likely by more than `threshold` nats a token: mean_t(logp_old - logp). DeepSeek-V3.2's off-policy sequence
    masking; TRL's `off_policy_mask_threshold` and slime's `opsm_delta`, to whose own log-probabilities slime compares.
    """
    gap = torch.where(mask, (logp_old - logp).detach(), 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return mask & (advantage < 0) & (gap > threshold)[:, None]


def _gap(
    logp_proximal: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    return torch.where(mask, (logp_proximal - logp_old).detach(), 0.0)
