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

s is the logistic function, b is beta, e is label_smoothing: the share of labels that are believed to be swapped. IPO is
taken per token, as TRL and its authors do; of sums, its target 1 / (2 b) would mean less the longer the answers are.

Axes: pairs; B = 2 * pairs rows, chosen then rejected; T tokens.
References: DPO (arXiv:2305.18290, eq. 7), cDPO (Mitchell, "A note on DPO with noisy preferences", 2023), rDPO
(arXiv:2403.00409), SLiC-HF (arXiv:2305.10425) in the form of RSO (arXiv:2309.06657), IPO (arXiv:2310.12036, eq. 17),
length-normalised DPO (Tulu 3, arXiv:2411.15124), SimPO (arXiv:2405.14734, eq. 6).
"""

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
    "formula",
    "hinge",
    "ipo",
    "known_reference",
    "pair_delta",
    "pair_loss",
    "robust",
    "sigmoid",
]

PairLoss: TypeAlias = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo"]

PER_TOKEN = frozenset({"sigmoid_norm", "ipo", "simpo"})
REFERENCE_FREE = frozenset({"simpo"})
SMOOTHED = frozenset({"sigmoid", "sigmoid_norm", "robust", "simpo"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLossConfig:
    """Which loss of a pair, and its numbers. Refuses those that the loss would not look at."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    loss: PairLoss = "sigmoid"
    """What is made of a pair's margin: `sigmoid` is DPO; `sigmoid_norm`, `ipo` and `simpo` look at means per token, so
    that longer answers weigh no more; `robust` corrects for swapped labels; `simpo` needs no reference."""

    beta: float = 0.1
    """How strongly the policy is held to the reference: higher stays closer for the same margin. `sigmoid_norm` and
    `simpo`, of means per token, want more of it: 1 to 10."""

    label_smoothing: float = 0.0
    """The share of labels that are believed to be swapped: with `sigmoid` higher stops at a smaller margin, which is
    cDPO; with `robust` it takes back what such labels add on average."""

    gamma: float = 0.0
    """The margin that `simpo` asks for, after `beta`: higher separates answers further; 0.3 to 0.5 of beta is usual."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"gamma": 0}, above={"beta": 0})
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


def pair_loss(delta: Float[Tensor, " pairs"], config: PairLossConfig) -> Float[Tensor, " pairs"]:
    """The loss of each pair, of the delta that `pair_delta` gives for the same configuration."""
    if config.loss == "robust":
        return robust(delta, beta=config.beta, label_smoothing=config.label_smoothing)
    if config.loss == "hinge":
        return hinge(delta, beta=config.beta)
    if config.loss == "ipo":
        return ipo(delta, beta=config.beta)
    return sigmoid(delta, beta=config.beta, label_smoothing=config.label_smoothing, gamma=config.gamma)


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


def formula(config: PairLossConfig) -> str:
    """The loss of a pair with its numbers in place, and in a second line what delta is."""
    margin = f"{config.beta:g} delta" + (f" - {config.gamma:g}" if config.gamma else "")
    right, wrong = f"log sigmoid({margin})", f"log sigmoid(-({margin}))"
    share = config.label_smoothing
    if config.loss == "hinge":
        pair = f"max(0, 1 - {margin})"
    elif config.loss == "ipo":
        pair = f"(delta - {1.0 / (2.0 * config.beta):g})^2"
    elif config.loss == "robust":
        pair = f"(-{1.0 - share:g} {right} + {share:g} {wrong}) / {1.0 - 2.0 * share:g}"
    elif share:
        pair = f"-{1.0 - share:g} {right} - {share:g} {wrong}"
    else:
        pair = f"-{right}"
    logratio = "logp" if config.reference_free else "(logp - logp_ref)"
    each = "mean" if config.per_token else "sum"
    return f"{pair}\ndelta = {each} of {logratio} over the chosen answer's tokens, less that over the rejected one's"
