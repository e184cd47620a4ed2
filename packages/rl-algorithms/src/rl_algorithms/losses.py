"""Losses of a token, and the weight of each token in the loss of a step: what `policy_gradient` composes.

    rho = exp(logp - logp_proximal)                                  importance ratio, of a token or of a whole answer
    REINFORCE   -A logp                                              Williams 1992
    clip        -min(rho A, clip(rho, 1 - low, 1 + high) A)          PPO, arXiv:1707.06347 eq. 7; high > low in DAPO
    dual clip   where A < 0: min(of the above, -c A)                 arXiv:1912.09729 eq. 5
    CISPO       -sg(clip(rho, 1 - low, 1 + high)) A logp             MiniMax-M1, arXiv:2506.13585 eq. 4-5
    SAPO        -4 / tau s(tau (rho - 1)) A                          arXiv:2511.20347 eq. 5; s the logistic function
    GMPO        -A prod_t clip(rho[t], e^-low, e^high)^(1/T)         arXiv:2507.20673 eq. 4
    VESPO       -sg(e^(l - l W) W^k) A logp, W = prod_t rho[t]       arXiv:2602.10693
    DPPO        -sg(min(rho, c)) A logp while |pi - mu| is small     arXiv:2602.04879 sec. 5, binary total variation
    KL-Cov      -rho A, and + c |log rho| where A and logp covary    arXiv:2505.22617 eq. 12

The names are those that an objective uses (`ratio.surrogate`), and `pieces` says how to add one of your own.

sg stops the gradient. A clipped token of PPO has no gradient; one of CISPO keeps its own, at the bounded weight.
A step's loss is the sum of its tokens' losses times `token_weights`:

    token-mean                 sum_i sum_t l[i,t] / N_tok                            DAPO; every token counts the same
    seq-mean-token-mean        sum_i (sum_t l[i,t] / T_i) / N_seq                    GRPO, GSPO; every response the same
    seq-mean-token-sum         sum_i sum_t l[i,t] / N_seq                            RLOO, REINFORCE
    seq-mean-token-sum-norm    sum_i sum_t l[i,t] / (N_seq L)                        Dr.GRPO; L a constant of the run

N_tok and N_seq count the trainable tokens, and the rows that have any, of the whole optimizer step, over every
microbatch and every rank. The parts of a step then add up to the same loss, however it was cut. The names are verl's.

An empty response, one without a trainable token, adds 0 to every loss and is not in N_seq: as in verl, and unlike TRL,
which counts it as a row of loss 0 and so makes the step smaller. Its reward stays in its group's baseline. So "mean
over responses" is over those that have something to train on, whatever the aggregation.

Other libraries differ: verl's `seq-mean-token-sum-norm` divides by L alone, not by N_seq: with 24 responses a step its
loss and gradient are 24 times larger than here, and so must a gradient clip or the learning rate of SGD be. For `grpo`
and `dr_grpo` TRL divides by all rows, those without a trainable token (masked as truncated) included, and its L is
`max_completion_length`; verl's L is `loss_scale_factor`, or the padded width of the batch where that is not set, and in
old versions always. Here L has to be given.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.kl import LOG_RATIO_LIMIT
from rl_algorithms.pieces import PieceName, find, piece

__all__ = [
    "Counts",
    "cispo",
    "clip",
    "clip_cov",
    "clipped_surrogate",
    "dppo_tv",
    "dual_clip",
    "gmpo",
    "high_entropy",
    "importance_ratio",
    "kl_cov",
    "reinforce",
    "sapo",
    "sequence_ratio",
    "token_ratio",
    "token_weights",
    "top_cov",
    "value_loss",
    "vespo",
]


def importance_ratio(
    logp: Float[Tensor, "B T"],
    logp_proximal: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    level: PieceName,
) -> Float[Tensor, "B T"]:
    """How much likelier a token, or a row, is now than under the proximal policy; 1 off the mask.

    Args:
        logp: the policy's.
        logp_proximal: of the policy that the ratio is taken to.
        mask: the trainable tokens, each row whole.
        level: `"token"`, `"sequence"`, or a function of yours.
    """
    log_ratio = torch.where(mask, logp - logp_proximal, 0.0)
    available = {"logp": logp, "logp_proximal": logp_proximal, "log_ratio": log_ratio, "mask": mask}
    found: Tensor = find("ratio", level)(available, {})
    return found


@piece("ratio", "token", formula="exp(logp - logp_proximal)", source="arXiv:1707.06347")
def token_ratio(log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Each token's own."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


@piece(
    "ratio",
    "sequence",
    formula="exp(mean over the answer's tokens of (logp - logp_proximal))",
    source="GSPO, arXiv:2507.18071 eq. 7 and 14",
)
def sequence_ratio(log_ratio: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """GSPO's s, the geometric mean over the row's trainable tokens, the same for each of them.

    It is length-normalised, unlike the plain product of RLOO in TRL. Its gradient is taken as in eq. 14,
    sg(s) exp(logp - sg(logp)): each token has its own, so that one of advantage or weight 0 has none. Where these are
    the row's, the sum over its tokens is that of eq. 5.
    """
    mean = log_ratio.detach().sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    held = torch.where(mask, mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), 0.0)
    return held.exp() * (log_ratio - log_ratio.detach()).exp()


@piece("surrogate", formula="-A logp", source="Williams 1992")
def reinforce(logp: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The score-function loss. Unbiased on-policy only; `corrections` has what off-policy tokens need."""
    return -advantage * logp


def _bounds(clip_low: float, clip_high: float) -> str:
    return f"{1 - clip_low:g}, {1 + clip_high:g}" if clip_low < 1 else f"0, {1 + clip_high:g}"


def _clip_formula(clip_low: float, clip_high: float, dual_clip: float | None) -> str:
    line = f"-min(rho A, clip(rho, {_bounds(clip_low, clip_high)}) A)"
    return line if dual_clip is None else f"{line}, and at most {dual_clip:g} |A| where A < 0"


@piece("surrogate", formula=_clip_formula, source="arXiv:1707.06347 eq. 7; dual_clip: arXiv:1912.09729 eq. 5")
def clip(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """`clipped_surrogate`, then `dual_clip` where that is not None."""
    per_token, clipped = clipped_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return per_token, clipped
    per_token, bound = _dual_clip(per_token, advantage, limit=dual_clip)
    return per_token, clipped | bound


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


_dual_clip = dual_clip  # `clip` has an argument of that name


def _cispo_formula(clip_low: float, clip_high: float) -> str:
    return f"-sg(clip(rho, {_bounds(clip_low, clip_high)})) A logp"


@piece("surrogate", formula=_cispo_formula, source="MiniMax-M1, arXiv:2506.13585 eq. 4-5")
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


def _positive(**numbers: float | None) -> str | None:
    wrong = [f"{name}={value}" for name, value in numbers.items() if value is not None and not value > 0]
    return f"{', '.join(wrong)} must be > 0" if wrong else None


@piece(
    "surrogate",
    formula="-(4 / tau) sigmoid(tau (rho - 1)) A, tau = {tau_positive:g} where A > 0, else {tau_negative:g}",
    source="SAPO, arXiv:2511.20347 eq. 5-6",
    refuse=_positive,
)
def sapo(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Float[Tensor, "B T"]:
    """A soft gate instead of a clip: the gradient's weight falls smoothly on either side of rho = 1, where it is 1.

    A larger temperature falls faster; the paper's is larger for tokens of negative advantage. Equal in TRL and verl.
    """
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    return -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * advantage


@piece(
    "surrogate",
    formula="-A prod_t clip(rho[t], exp(-{clip_low:g}), exp({clip_high:g}))^(1 / T_i), clipped as PPO does",
    source="GMPO, arXiv:2507.20673 eq. 4",
)
def gmpo(
    log_ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """The geometric mean of a row's clipped ratios instead of their arithmetic one; the same for each of its tokens.

    The clip is of the logarithm, so the bounds are e^-low and e^high, and pessimistic as PPO's: for A > 0 only from
    above, for A < 0 only from below. The paper takes 0.4 and a mean over responses (`seq-mean-token-mean`).
    Equal in verl (`geo_mean`) up to its 1e-8 in the denominator, and in TRL. Both need one advantage a row: so does
    the formula, and with an advantage of each token it is that token's own times the row's mean.
    """
    held = log_ratio.clamp(-clip_low, clip_high)
    kept = torch.where(advantage > 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held))
    kept = torch.where(mask, kept, 0.0)
    mean = kept.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return -advantage * mean.exp(), kept != log_ratio


@piece(
    "surrogate",
    formula="-sg(exp(lam - lam W) W^k) A logp, W = prod_t rho[t]; k = {k_positive:g}, lam = {lambda_positive:g} where "
    "A >= 0, else k = {k_negative:g}, lam = {lambda_negative:g}",
    source="VESPO, arXiv:2602.10693",
)
def vespo(
    logp: Float[Tensor, "B T"],
    log_ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Float[Tensor, "B T"]:
    """REINFORCE weighed by a gamma-shaped function of the whole row's ratio: 1 at W = 1, towards 0 on either side.

    TRL's defaults. log W is held within log 1e-8 and 20, as there; TRL also multiplies W by its engine correction,
    which here is `correction` and weighs the loss instead.
    """
    log_ratio = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_w = log_ratio.sum(dim=1, keepdim=True).clamp(LOG_SMALLEST_W, LOG_RATIO_LIMIT)
    k = torch.where(advantage >= 0, k_positive, k_negative)
    lam = torch.where(advantage >= 0, lambda_positive, lambda_negative)
    return -(lam + k * log_w - lam * log_w.exp()).exp().to(logp.dtype) * advantage * logp


LOG_SMALLEST_W = -18.420680743952367
"""log 1e-8, the least ratio of a row that `vespo` tells from smaller ones."""


@piece(
    "surrogate",
    formula="-sg(min(rho, {ratio_limit:g})) A logp while pi - mu <= {clip_high:g} (A > 0) or >= -{clip_low:g} (else), "
    "then 0",
    source="DPPO, arXiv:2602.04879 sec. 5.4",
    refuse=lambda ratio_limit, **_: None if ratio_limit >= 1 else f"ratio_limit={ratio_limit} must be >= 1",
)
def dppo_tv(
    logp: Float[Tensor, "B T"],
    logp_proximal: Float[Tensor, "B T"],
    *,
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_limit: float = 20.0,
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """REINFORCE at the truncated ratio, for tokens whose probability has not moved far the way their advantage pushes.

    The bound is on the difference of probabilities, half of which is the total variation between the two policies as
    coins that toss this token or another one. So rare tokens may change by large factors. As verl's `dppo_tv`, whose
    `clip_ratio_low` and `clip_ratio_high` are these bounds.
    """
    moved = logp.detach().exp() - logp_proximal.exp()
    stopped = torch.where(advantage > 0, moved > clip_high, moved < -clip_low)
    per_token = -ratio.detach().clamp(max=ratio_limit) * advantage * logp
    return torch.where(stopped, 0.0, per_token), stopped


@piece(
    "surrogate",
    formula="-rho A, and + {kl_weight:g} |logp - logp_proximal| for the selected tokens",
    source="KL-Cov, arXiv:2505.22617 eq. 12",
)
def kl_cov(
    log_ratio: Float[Tensor, "B T"],
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    *,
    selected: Bool[Tensor, "B T"],
    kl_weight: float = 1.0,
) -> Float[Tensor, "B T"]:
    """No clip; the tokens that would cost the most entropy are held to the policy that the ratio is taken to.

    Which tokens these are `selection.tokens` says: `"top_cov"`.
    """
    return -ratio * advantage + torch.where(selected, kl_weight * log_ratio.abs(), 0.0)


def _covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A) (logp - mean logp) of each trainable token, means over all of them; -inf off the mask."""
    number = mask.sum().clamp(min=1)
    centered = [
        torch.where(mask, each, 0.0) - torch.where(mask, each, 0.0).sum() / number for each in (advantage, logp)
    ]
    return torch.where(mask, centered[0] * centered[1], -torch.inf)


def _largest(values: Tensor, number: int) -> Tensor:
    """Where the `number` largest values are; more where some equal the last of them, so that no order decides."""
    if number <= 0 or not values.numel():
        return torch.zeros_like(values, dtype=torch.bool)
    least = values.flatten().topk(min(number, values.numel())).values[-1]
    return (values >= least) & values.isfinite()


@piece(
    "tokens",
    formula="the {share:g} of the step's tokens with the largest covariance (A - mean A) (logp - mean logp)",
    source="KL-Cov, arXiv:2505.22617 sec. 4.2",
    whole_step=True,
)
def top_cov(
    logp_proximal: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    share: float = 2e-4,
) -> Bool[Tensor, "B T"]:
    """The tokens that `kl_cov` holds.

    verl looks at the policy's log-probabilities at each microbatch, and so selects other tokens for another cut; here
    they are those of the policy that the ratio is taken to, over the whole step. At the first step on a batch these
    are the same.
    """
    return _largest(_covariance(logp_proximal, advantage, mask), max(1, int(share * int(mask.sum()))))


@piece(
    "tokens",
    formula="all of the step's tokens but the {share:g} of largest covariance (A - mean A) (logp - mean logp) within "
    "({low:g}, {high:g})",
    source="Clip-Cov, arXiv:2505.22617 sec. 4.1",
    whole_step=True,
)
def clip_cov(
    logp_proximal: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Bool[Tensor, "B T"]:
    """Take the gradient from a few of the tokens that would cost much entropy.

    verl draws them at random among those within the bounds, from each microbatch; here the largest are taken, over the
    whole step and of the policy that the ratio is taken to, so that neither the cut nor the order of rows matters.
    """
    covariance = _covariance(logp_proximal, advantage, mask)
    within = torch.where((covariance > low) & (covariance < high), covariance, -torch.inf)
    return ~_largest(within, max(1, int(share * int(mask.sum()))))


@piece(
    "tokens",
    formula="the {share:g} of each answer's tokens with the largest entropy",
    source="arXiv:2506.01939",
)
def high_entropy(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, share: float = 0.2
) -> Bool[Tensor, "B T"]:
    """Train on forking tokens alone: those at which the policy is least sure.

    The paper and TRL (`top_entropy_quantile`) take the share over a batch, which changes with the microbatch; here it
    is of each response, at least one token of it. Needs a policy that gives entropies.
    """
    entropy = torch.where(mask, entropy.detach(), -torch.inf)
    number = (share * mask.sum(dim=1, keepdim=True)).ceil().clamp(min=1).long()
    ranked = entropy.sort(dim=1, descending=True).values
    least = ranked.gather(1, (number - 1).clamp(max=max(ranked.shape[1] - 1, 0))) if ranked.shape[1] else ranked[:, :1]
    return mask & (entropy >= least)


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
    mask: Bool[Tensor, "B T"], aggregation: PieceName, counts: Counts, *, max_length: int | None = None
) -> Float[Tensor, "B T"]:
    """What each token of some rows of a step weighs in its loss; float64, 0 off the mask. No row, no weight, no NaN.

    Args:
        mask: the trainable tokens of these rows, each row whole.
        aggregation: see above, or a function of yours.
        counts: of the whole step.
        max_length: L of `"seq-mean-token-sum-norm"`, in tokens; the longest answer that the run allows.

    Raises:
        ValueError: `max_length` is missing where it is needed.
    """
    found = find("aggregation", aggregation)
    available: dict[str, Any] = {"mask": mask, "counts": counts}
    weights: Tensor = found(available, found.bound(options={}, max_length=max_length))
    return weights


@piece("aggregation", "token-mean", formula="sum_i sum_t l / N_tok", source="DAPO, arXiv:2503.14476")
def _token_mean(mask: Bool[Tensor, "B T"], counts: Counts) -> Float[Tensor, "B T"]:
    return mask.double() / max(counts.tokens, 1)


@piece("aggregation", "seq-mean-token-mean", formula="sum_i (sum_t l / T_i) / N_seq", source="GRPO, arXiv:2402.03300")
def _seq_mean_token_mean(mask: Bool[Tensor, "B T"], counts: Counts) -> Float[Tensor, "B T"]:
    return mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1) / max(counts.sequences, 1)


@piece("aggregation", "seq-mean-token-sum", formula="sum_i sum_t l / N_seq", source="RLOO, arXiv:2402.14740")
def _seq_mean_token_sum(mask: Bool[Tensor, "B T"], counts: Counts) -> Float[Tensor, "B T"]:
    return mask.double() / max(counts.sequences, 1)


def _needs_max_length(max_length: int | None) -> str | None:
    return (
        None
        if max_length is not None
        else (
            "aggregation='seq-mean-token-sum-norm' divides by a constant length and max_length is None; "
            "set it to the longest answer that the run allows, in tokens"
        )
    )


@piece(
    "aggregation",
    "seq-mean-token-sum-norm",
    formula="sum_i sum_t l / (N_seq * {max_length})",
    source="Dr.GRPO, arXiv:2503.20783",
    refuse=_needs_max_length,
)
def _seq_mean_token_sum_norm(mask: Bool[Tensor, "B T"], counts: Counts, *, max_length: int) -> Float[Tensor, "B T"]:
    return mask.double() / (max(counts.sequences, 1) * max_length)
