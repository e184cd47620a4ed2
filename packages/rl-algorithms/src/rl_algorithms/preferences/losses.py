"""What DPO and its kin make of a pair: pure functions from its margin to its loss.

    a     = logp - logp_ref of an answer, the log-probabilities of its tokens summed; n is how many they are
    delta = a_chosen - a_rejected                              "sigmoid", "robust", "hinge"
    delta = a_chosen / n_chosen - a_rejected / n_rejected      "sigmoid_norm", "ipo", and "simpo" with logp_ref = 0

    sigmoid         -(1 - e) log s(b delta) - e log s(-b delta)                  least at b delta = log((1 - e) / e)
    sigmoid_norm    the same, of the means per token
    robust          (-(1 - e) log s(b delta) + e log s(-b delta)) / (1 - 2 e)    unbounded below
    hinge           max(0, 1 - b delta)
    ipo             (delta - 1 / (2 b))^2
    simpo           -(1 - e) log s(b delta - gamma) - e log s(gamma - b delta)
    exo             KL((s(b delta), s(-b delta)) || (1 - e, e))
    discopop        -(1 - m) log s(b delta) + m e^(-b delta),    m = s(b delta / tau)

c and r are a of the chosen and the rejected answer, sums over tokens:

    bco             -log s(b c) - log s(-b r)
    nca             -log s(b c) - log s(-b c) / 2 - log s(-b r) / 2
    sppo            (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2
    apo_zero        1 - s(b c) + s(b r)                     chosen answers better than the policy's own: c up, r down
    apo_down        s(b c) + 1 - s(b (c - r))               worse than the policy's own: both down, r further
    aot             sigmoid of the k-th smallest m less the k-th smallest n of the step's pairs,
                    m = logp_c - logp_r, n = logp_ref_c - logp_ref_r
    aot_unpaired    sigmoid of the k-th smallest c less the k-th smallest r

All equal TRL's of these names (`exo_pair`, `nca_pair`, `bco_pair`, `sppo_hard` there). BCO's paper subtracts from b c
and b r a running mean of both, which TRL's pair form leaves out, as does this one; SPPO's uses probabilities of a
preference model, and 1 and 0 are these for a labelled pair. s is the logistic function, b is beta, e is
label_smoothing: the share of labels that are believed to be swapped. IPO is taken per token, as TRL and its authors do;
of sums, its target 1 / (2 b) would mean less the longer the answers are.

Axes: pairs; B = 2 * pairs rows, chosen then rejected; T tokens.
References: DPO (arXiv:2305.18290, eq. 7), cDPO (Mitchell, "A note on DPO with noisy preferences", 2023), rDPO
(arXiv:2403.00409), SLiC-HF (arXiv:2305.10425) in the form of RSO (arXiv:2309.06657), IPO (arXiv:2310.12036, eq. 17),
length-normalised DPO (Tulu 3, arXiv:2411.15124), SimPO (arXiv:2405.14734, eq. 6), EXO (arXiv:2402.00856, eq. 16), NCA
(arXiv:2402.05369), BCO (arXiv:2404.04656), SPPO (arXiv:2405.00675, eq. 4.7), APO (arXiv:2408.06266, eq. 7 and 8),
DiscoPOP (arXiv:2406.08414, eq. 5), AOT (arXiv:2406.05882).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rl_algorithms.choices import check_fields

__all__ = [
    "PairLoss",
    "PairLossConfig",
    "aot",
    "apo_down",
    "apo_zero",
    "bco",
    "discopop",
    "exo",
    "formula",
    "hinge",
    "ipo",
    "known_reference",
    "nca",
    "pair_delta",
    "pair_loss",
    "robust",
    "sigmoid",
    "sppo",
]

PairLoss: TypeAlias = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "hinge",
    "ipo",
    "simpo",
    "exo",
    "discopop",
    "bco",
    "nca",
    "sppo",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
]

PER_TOKEN = frozenset({"sigmoid_norm", "ipo", "simpo"})
REFERENCE_FREE = frozenset({"simpo"})
SMOOTHED = frozenset({"sigmoid", "sigmoid_norm", "robust", "simpo", "exo", "aot", "aot_unpaired"})
SORTED = frozenset({"aot", "aot_unpaired"})
"""Losses that compare values of equal rank among all pairs of the step; see `answers.match_ranks`."""
OF_EACH_ANSWER = frozenset({"bco", "nca", "sppo", "apo_zero", "apo_down"})
"""Losses of the two log-ratios, not of their difference alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLossConfig:
    """Which loss of a pair, and its numbers. Refuses those that the loss would not look at."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    loss: PairLoss = "sigmoid"
    """What is made of a pair's margin: `sigmoid` is DPO; `sigmoid_norm`, `ipo` and `simpo` look at means per token, so
    that longer answers weigh no more; `robust` corrects for swapped labels; `simpo` needs no reference. `apo_zero`,
    `apo_down`, `bco`, `nca`, `sppo` look at each answer by itself; `exo`, `discopop` are other functions of the margin;
    `aot`, `aot_unpaired` compare the distributions of the step, value by value in sorted order, for one more forward.
    """

    beta: float = 0.1
    """How strongly the policy is held to the reference: higher stays closer for the same margin. `sigmoid_norm` and
    `simpo`, of means per token, want more of it: 1 to 10."""

    label_smoothing: float = 0.0
    """The share of labels that are believed to be swapped: with `sigmoid` higher stops at a smaller margin, which is
    cDPO; with `robust` it takes back what such labels add on average."""

    gamma: float = 0.0
    """The margin that `simpo` asks for, after `beta`: higher separates answers further; 0.3 to 0.5 of beta is usual."""

    discopop_tau: float = 0.05
    """The temperature of `discopop`'s blend; lower switches more sharply from the logistic to the exponential part."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"gamma": 0}, above={"beta": 0, "discopop_tau": 0})
        if self.discopop_tau != 0.05 and self.loss != "discopop":
            raise ValueError(
                f"discopop_tau={self.discopop_tau} is of loss='discopop', and loss={self.loss!r} has none; leave it out"
            )
        if self.loss == "exo" and not self.label_smoothing:
            raise ValueError(
                "label_smoothing=0.0 makes loss='exo' infinite: it compares with a label that is right with "
                "probability 1 - label_smoothing; 1e-3 is what the authors take"
            )
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be >= 0 and < 0.5: at one half the labels say nothing, "
                f"beyond it the opposite"
            )
        if self.label_smoothing and self.loss not in SMOOTHED:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} is not defined for loss={self.loss!r}; set it to 0, or take "
                f"one of {', '.join(sorted(SMOOTHED))}"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError(
                "label_smoothing=0.0 makes loss='robust' the same as 'sigmoid'; give the share of swapped labels"
            )
        if self.gamma and self.loss != "simpo":
            raise ValueError(
                f"gamma={self.gamma} is a margin of loss='simpo', and loss={self.loss!r} has none; set it to 0"
            )

    @property
    def per_token(self) -> bool:
        """Whether answers are compared by their mean per token."""
        return self.loss in PER_TOKEN

    @property
    def reference_free(self) -> bool:
        """Whether the loss needs no reference."""
        return self.loss in REFERENCE_FREE


def known_reference(logp_ref: Float[Tensor, " B"], config: PairLossConfig) -> Float[Tensor, " B"]:
    """What answers are compared with: `logp_ref`, or zeros for a loss that needs none.

    Raises:
        ValueError: a log-probability under the reference is needed and is not a finite number.
    """
    if config.reference_free:
        return torch.zeros_like(logp_ref)
    unknown = (~logp_ref.isfinite()).nonzero()[:, 0].tolist()
    if unknown:
        raise ValueError(
            f"logp_ref of pair {unknown[0] // 2} is {logp_ref[unknown[0]].item()}, and loss={config.loss!r} compares "
            f"with the reference; give the examples to with_reference(reference, examples) before the first step"
        )
    return logp_ref


def pair_delta(
    logratio: Float[Tensor, " B"], trainable: Bool[Tensor, "B T"], config: PairLossConfig
) -> Float[Tensor, " pairs"]:
    """How much more the policy has come to prefer chosen to rejected; `logratio` is a of each row, see above."""
    compared = logratio / trainable.sum(dim=1) if config.per_token else logratio
    return compared[0::2] - compared[1::2]


def pair_loss(
    delta: Float[Tensor, " pairs"],
    config: PairLossConfig,
    *,
    chosen: Float[Tensor, " pairs"] | None = None,
    rejected: Float[Tensor, " pairs"] | None = None,
) -> Float[Tensor, " pairs"]:
    """The loss of each pair.

    Args:
        delta: as `pair_delta` gives it for the same configuration.
        config: which loss.
        chosen: log-ratio of the chosen answers, summed over tokens; needed by the losses of each answer.
        rejected: that of the rejected ones.

    Raises:
        ValueError: the loss looks at each answer, and these were not given.
    """
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss in OF_EACH_ANSWER:
        if chosen is None or rejected is None:
            raise ValueError(f"loss={config.loss!r} is of each answer's log-ratio; give chosen= and rejected=")
        return {"bco": bco, "nca": nca, "sppo": sppo, "apo_zero": apo_zero, "apo_down": apo_down}[config.loss](
            chosen, rejected, beta=beta
        )
    if config.loss == "robust":
        return robust(delta, beta=beta, label_smoothing=smoothing)
    if config.loss == "exo":
        return exo(delta, beta=beta, label_smoothing=smoothing)
    if config.loss == "discopop":
        return discopop(delta, beta=beta, tau=config.discopop_tau)
    if config.loss == "hinge":
        return hinge(delta, beta=beta)
    if config.loss == "ipo":
        return ipo(delta, beta=beta)
    return sigmoid(delta, beta=beta, label_smoothing=smoothing, gamma=config.gamma)


def sigmoid(
    delta: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0
) -> Float[Tensor, " pairs"]:
    """DPO; with label smoothing cDPO; of reference-free means and a target margin `gamma`, SimPO."""
    margin = beta * delta - gamma
    right = -logsigmoid(margin)
    if not label_smoothing:  # its term may be infinite, and 0 * inf is NaN
        return right
    return (1.0 - label_smoothing) * right - label_smoothing * logsigmoid(-margin)


def robust(delta: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float) -> Float[Tensor, " pairs"]:
    """RDPO: over labels that are swapped with probability `label_smoothing`, its mean is `sigmoid` of the true ones."""
    right, wrong = -logsigmoid(beta * delta), -logsigmoid(-beta * delta)
    return ((1.0 - label_smoothing) * right - label_smoothing * wrong) / (1.0 - 2.0 * label_smoothing)


def hinge(delta: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """SLiC: nothing more to gain once the margin is 1."""
    return relu(1.0 - beta * delta)


def ipo(delta: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """IPO: a margin to reach and not to pass, so that pairs whose label is certain are not driven to infinity."""
    return (delta - 1.0 / (2.0 * beta)) ** 2


def exo(delta: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float) -> Float[Tensor, " pairs"]:
    """EXO for pairs: the reverse KL from the policy's preference to the label's, so that it does not spread."""
    right, wrong = logsigmoid(beta * delta), logsigmoid(-beta * delta)
    return right.exp() * (right - math.log1p(-label_smoothing)) + wrong.exp() * (wrong - math.log(label_smoothing))


def discopop(delta: Float[Tensor, " pairs"], *, beta: float, tau: float) -> Float[Tensor, " pairs"]:
    """DiscoPOP: logistic where the policy is wrong, exponential where it is right; found by search, not convex."""
    margin = beta * delta
    blend = torch.sigmoid(margin / tau)
    return -logsigmoid(margin) * (1 - blend) + torch.exp(-margin) * blend


def bco(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """Two binary classifications, chosen as 1 and rejected as 0."""
    return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)


def nca(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """Noise-contrastive alignment: chosen answers are the data, both are noise; it keeps c from sinking."""
    noise = logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)
    return -logsigmoid(beta * chosen) - noise / 2


def sppo(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """Self-play preference optimisation: a target for each log-ratio, 1 / (2 beta) up and down."""
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def apo_zero(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """Anchored: chosen answers are better than what the policy says, rejected ones worse."""
    return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """Anchored: both answers are worse than what the policy says, and rejected ones worse than chosen ones."""
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * (chosen - rejected))


def aot(
    better: Float[Tensor, " pairs"], worse: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Tensor, " pairs"]:
    """Alignment by optimal transport: `sigmoid` of the k-th smallest of one less the k-th smallest of the other.

    Paired: `better` are the policy's margins logp_c - logp_r and `worse` the reference's. Unpaired: the log-ratios of
    chosen and of rejected answers, which then need not be of the same prompts. The k-th smallest depends on all pairs
    of the step, and a loss is asked for some rows: `dpo` trains with `answers.match_ranks`, which sorts before the step
    is cut, and is this in value and gradient.
    """
    return sigmoid(better.sort().values - worse.sort().values, beta=beta, label_smoothing=label_smoothing)


def formula(config: PairLossConfig) -> str:
    """The loss of a pair with its numbers in place, and in a second line what delta is."""
    margin = f"{config.beta:g} delta" + (f" - {config.gamma:g}" if config.gamma else "")
    right, wrong = f"log sigmoid({margin})", f"log sigmoid(-({margin}))"
    share = config.label_smoothing
    if config.loss == "hinge":
        pair = f"max(0, 1 - {margin})"
    elif config.loss == "ipo":
        pair = f"(delta - {1.0 / (2.0 * config.beta):g})^2"
    elif config.loss == "exo":
        pair = f"sigmoid({margin}) ({right} - log {1 - share:g}) + sigmoid(-({margin})) ({wrong} - log {share:g})"
    elif config.loss == "discopop":
        pair = f"-(1 - m) {right} + m exp(-({margin})), m = sigmoid({margin} / {config.discopop_tau:g})"
    elif config.loss in OF_EACH_ANSWER:
        beta, target = f"{config.beta:g}", f"{0.5 / config.beta:g}"
        pair = {
            "bco": f"-log sigmoid({beta} c) - log sigmoid(-{beta} r)",
            "nca": f"-log sigmoid({beta} c) - (log sigmoid(-{beta} c) + log sigmoid(-{beta} r)) / 2",
            "sppo": f"(c - {target})^2 + (r + {target})^2",
            "apo_zero": f"1 - sigmoid({beta} c) + sigmoid({beta} r)",
            "apo_down": f"sigmoid({beta} c) + 1 - sigmoid({beta} (c - r))",
        }[config.loss]
        return f"{pair}\nc, r = sum of (logp - logp_ref) over the chosen and over the rejected answer's tokens"
    elif config.loss == "robust":
        pair = f"(-{1.0 - share:g} {right} + {share:g} {wrong}) / {1.0 - 2.0 * share:g}"
    elif share:
        pair = f"-{1.0 - share:g} {right} - {share:g} {wrong}"
    else:
        pair = f"-{right}"
    if config.loss == "aot":
        return (
            f"{pair}\ndelta = k-th smallest logp margin, chosen less rejected, less the k-th smallest logp_ref margin"
        )
    if config.loss == "aot_unpaired":
        return (
            f"{pair}\ndelta = k-th smallest sum of (logp - logp_ref) over chosen answers, less that over rejected ones"
        )
    logratio = "logp" if config.reference_free else "(logp - logp_ref)"
    each = "mean" if config.per_token else "sum"
    return f"{pair}\ndelta = {each} of {logratio} over the chosen answer's tokens, less that over the rejected one's"
