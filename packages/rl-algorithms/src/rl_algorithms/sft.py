"""Supervised fine-tuning, whole: imitate the answers of demonstrations.

    L = -sum_i w_i sum_t logp[i,t] / sum_i w_i T_i              "token-mean": every token counts the same
    L = -sum_i w_i (sum_t logp[i,t] / T_i) / sum_i w_i          "seq-mean-token-mean": every row the same

t runs over the T_i trainable tokens of row i: the answer's with its stop token, or what the conversation's mask says.
w_i is the row's weight, 1 unless the data says otherwise: 2 is the row given twice, 0 a row left out, as is one without
a trainable token. The sums are over the whole optimizer step, over every microbatch and every rank; dividing each
microbatch by its own count instead would weigh tokens by the length of their neighbours. Axes: B rows, T tokens.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms import observation, offline
from rl_algorithms.chat import Demonstration, TokenizedConversation
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Policy, Sums
from rl_algorithms.losses import Counts, token_weights
from rl_algorithms.padding import pad

__all__ = ["Examples", "Lessons", "SFTConfig", "explain", "prepare", "step", "train"]

Lessons: TypeAlias = Sequence[Demonstration | TokenizedConversation]
"""Answers after their prompts, or conversations with a mask of what is learnt. `row.weight`, if there is one, is w."""

RELATIVE = Counts(tokens=1, sequences=1)
"""Weights of tokens relative to one another; their sum over the step takes the place of its counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """What an SFT run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 128
    """Demonstrations in each step, over all ranks. Larger is steadier and slower."""

    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    """Whether every token counts the same, or every row: then the tokens of short answers count more."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"max_num_steps": 1, "batch_size": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Demonstrations made ready for the loss."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]
    weight: Float[Tensor, " B"]
    """What each row counts; only the proportions matter."""


def explain(config: SFTConfig) -> str:
    """The formula that the configuration amounts to."""
    each = {"token-mean": "-sum of w logp / sum of w", "seq-mean-token-mean": "-sum of w mean(logp) / sum of w"}
    over = {"token-mean": "trainable tokens", "seq-mean-token-mean": "rows with a trainable token"}
    return f"L = {each[config.aggregation]}, both over the step's {over[config.aggregation]}; w is the row's weight"


def train(
    *, policy: Policy, demonstrations: Iterator[Lessons], config: SFTConfig, version: int = 0, steps_taken: int = 0
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    To go on with a run, give the `steps_taken` so far, and demonstrations from there on.
    """
    return offline.train(
        lambda lessons: step(policy, prepare(lessons), config),
        demonstrations,
        config=config,
        version=version,
        steps_taken=steps_taken,
        name="demonstrations",
        size=config.batch_size,
    )


def prepare(demonstrations: Lessons) -> Examples:
    """Pad to one width; only what is to be imitated is trainable. A row's first token never is: it follows nothing.

    Raises:
        ValueError: there are no demonstrations, or a weight is no finite number >= 0; it names the row.
    """
    if not demonstrations:
        raise ValueError("there are no demonstrations in this step; it needs at least one")
    weights = [float(getattr(item.row, "weight", 1.0)) for item in demonstrations]
    for item, weight in zip(demonstrations, weights, strict=True):
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"{item.row.where}: weight={weight} must be finite and >= 0; 0 leaves the row out")
    padded = pad([item.tokens for item in demonstrations], answer_starts=[1] * len(weights))
    learnt = pad([_learnt(item) for item in demonstrations], answer_starts=[1] * len(weights)).tokens.bool()
    learnt, counted = learnt & padded.answer, torch.tensor(weights)
    return Examples(tokens=padded.tokens, lengths=padded.lengths, trainable=learnt, weight=counted)


def step(policy: Policy, examples: Examples, config: SFTConfig) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log.

    `rows_without_tokens` counts rows that nothing is learnt from: no token is trainable, or the weight is 0.

    Raises:
        ValueError: no token of the step is trainable, or all that are have weight 0, so that L would be 0 / 0.
    """
    weights = _weights(examples, config)
    if not weights.any():
        raise ValueError(
            f"none of the {examples.tokens.numel()} tokens of this step is trainable with a weight above 0; look at "
            f"the masks and weights of its {len(examples.tokens)} rows"
        )
    total = weights.sum().item()
    return {
        **offline.take_step(policy, examples, functools.partial(_loss, config=config, total=total), mean_over=1),
        "trained_tokens": (weights > 0).sum().item(),
        "rows_without_tokens": (weights == 0).all(dim=1).sum().item(),
    }


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: SFTConfig, total: float
) -> tuple[Float[Tensor, ""], Sums]:
    columns, sums = _token_losses(logp, examples, config=config, total=total)
    return columns["loss"].sum(), sums


def _token_losses(
    logp: Float[Tensor, "B T"], examples: Examples, *, config: SFTConfig, total: float
) -> tuple[dict[str, Tensor], Sums]:
    weights = _weights(examples, config)
    loss = -(torch.where(weights > 0, logp, 0.0) * weights) / total
    return {"logp": logp.detach(), "loss": loss}, {"loss": loss.detach().sum()}


observation.TOKEN_LOSSES[_loss] = _token_losses


def _weights(examples: Examples, config: SFTConfig) -> Float[Tensor, "B T"]:
    return token_weights(examples.trainable, config.aggregation, RELATIVE) * examples.weight[:, None]


def _learnt(item: Demonstration | TokenizedConversation) -> list[int]:
    if isinstance(item, TokenizedConversation):
        return [int(mark) for mark in item.trainable]
    return [int(place >= item.prompt_length) for place in range(len(item.tokens))]
