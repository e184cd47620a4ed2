"""Reward models, whole: a score for a whole answer, from pairs of which one is better or from given scores.

    L = mean over pairs of  -log sigmoid(s_c - s_r - m)  +  c (s_c + s_r)^2        "bradley-terry"
    L = mean over rows of   (s - y)^2                                              "regression"

s is read at the last token of a row. m is `margin_weight` times the pair's own margin, where the data has one; c is
`centering_weight`. Without it the first loss is the same of s + 1: only differences are learnt, and scores may drift
anywhere. Means are over the whole optimizer step. With label smoothing e each pair counts as 1 - e right and e swapped.

Axes: B rows, for pairs 2i chosen and 2i + 1 rejected; T tokens.
References: Bradley-Terry scores (arXiv:2203.02155, eq. 1), the margin (arXiv:2307.09288, eq. 2), centring
(arXiv:2312.09244, section 3).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from rl_algorithms import offline
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import ScoreModel, Sums
from rl_algorithms.preferences.losses import sigmoid
from rl_algorithms.preferences.scored import PairExamples, Scored, ScoredExamples, num_units, score_sums

__all__ = ["RewardModelConfig", "bradley_terry", "evaluate", "explain", "step", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """What the training of a reward model may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take."""

    objective: Literal["bradley-terry", "regression"] = "bradley-terry"
    """Whether it learns from pairs, or from scores that the data gives."""

    batch_size: int = 64
    """Pairs, or scored answers, in each step, over all ranks."""

    margin_weight: float = 1.0
    """Times a pair's margin is what its scores shall differ by beyond 0; 0 ignores margins."""

    centering_weight: float = 0.0
    """Higher holds the scores of a pair closer to opposite numbers, so that 0 is the middle; 0.01 is usual."""

    label_smoothing: float = 0.0
    """The share of pairs that are believed to be swapped: higher stops at a smaller difference of scores."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"max_num_steps": 1, "batch_size": 1, "margin_weight": 0, "centering_weight": 0})
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be >= 0 and < 0.5")
        for name in ("centering_weight", "label_smoothing"):
            if self.objective == "regression" and getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} is for pairs, and objective='regression'; set it to 0")


def explain(config: RewardModelConfig) -> str:
    """The formula that the configuration amounts to."""
    if config.objective == "regression":
        return "L = mean over the step's rows of (s - y)^2\ns = score at the row's last token, y = the data's score"
    margin = f" - {config.margin_weight:g} * margin" if config.margin_weight else ""
    right, share = f"log sigmoid(s_c - s_r{margin})", config.label_smoothing
    pair = f"-{1 - share:g} {right} - {share:g} log sigmoid(-(s_c - s_r{margin}))" if share else f"-{right}"
    centred = f" + {config.centering_weight:g} (s_c + s_r)^2" if config.centering_weight else ""
    return f"L = mean over the step's pairs of [{pair}{centred}]\ns = score at the row's last token"


def train(
    *,
    model: ScoreModel,
    examples: Scored,
    config: RewardModelConfig,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    To go on with a run, give the same examples and the `steps_taken` so far.
    """
    drawn = offline.draw_batches(examples, config=config, steps_taken=steps_taken, seed=seed)
    train_on = functools.partial(step, model, config=config)
    return offline.train(train_on, drawn, config=config, version=version, steps_taken=steps_taken)


def step(model: ScoreModel, examples: Scored, config: RewardModelConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log, as means over pairs or rows.

    Raises:
        TypeError: the examples are not of the kind that the objective learns from.
        ValueError: there are none.
    """
    kind, number = PairExamples if config.objective == "bradley-terry" else ScoredExamples, num_units(examples)
    if not isinstance(examples, kind):
        given = type(examples).__name__
        raise TypeError(f"objective={config.objective!r} learns from scored.{kind.__name__}, and was given {given}")
    loss = functools.partial(_loss, config=config, number=number)
    return offline.take_step(model, examples, loss, mean_over=number, output="score")


def evaluate(model: ScoreModel, examples: Scored) -> dict[str, float]:
    """How well scores tell chosen from rejected, or how close they come to those of the data, without training.

    Returns: the means of `scored.score_sums` over pairs or rows.

    Raises:
        ValueError: there are no examples.
    """
    number = num_units(examples)
    return {name: (total / number).item() for name, total in score_sums(model.score(examples), examples).items()}


def bradley_terry(
    scores: Float[Tensor, " B"], margin: Float[Tensor, " B"], config: RewardModelConfig
) -> Float[Tensor, " pairs"]:
    """The loss of each pair of rows."""
    chosen, rejected = scores[0::2], scores[1::2]
    delta = chosen - rejected - config.margin_weight * margin[0::2]
    loss = sigmoid(delta, beta=1.0, label_smoothing=config.label_smoothing)
    return loss + config.centering_weight * (chosen + rejected) ** 2


def _loss(
    scores: Float[Tensor, " B"], examples: Scored, *, config: RewardModelConfig, number: int
) -> tuple[Float[Tensor, ""], Sums]:
    if isinstance(examples, PairExamples):
        each = bradley_terry(scores, examples.margin, config)
    else:
        each = (scores - examples.target) ** 2
    loss = each.sum() / number
    return loss, {"loss": loss.detach(), **score_sums(scores.detach(), examples)}
