"""Supervised fine-tuning, whole: imitate the answers of demonstrations.

    L = -sum_t logp[t] / N        over the answer's tokens, the stop token included; never the prompt's

N counts the trainable tokens of the whole optimizer step, over every microbatch and every rank. Dividing each
microbatch by its own count instead would weigh tokens by the length of their neighbours.

Axes: B rows, T tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.chat import Demonstration
from rl_algorithms.contracts import Policy, Sums
from rl_algorithms.padding import pad
from rl_algorithms.phases import PhaseTimer

__all__ = ["Examples", "SFTConfig", "prepare", "step", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """What an SFT run may choose."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    max_num_steps: int
    """Optimizer steps to take."""

    batch_size: int = 128
    """Demonstrations in each step, over all ranks. Larger is steadier and slower."""

    def __post_init__(self) -> None:
        for name in ("max_num_steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Demonstrations made ready for the loss."""

    rows_per_unit: ClassVar[int] = 1
    tokens: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    trainable: Bool[Tensor, "B T"]


def train(
    *,
    policy: Policy,
    demonstrations: Iterator[list[Demonstration]],
    config: SFTConfig,
    version: int = 0,
    steps_taken: int = 0,
) -> Iterator[dict[str, float]]:
    """Take `max_num_steps` steps; after each, yield what to log, the new `version` included.

    To go on with a run, give the `steps_taken` so far, and demonstrations from there on.
    """
    timer = PhaseTimer()
    for _ in range(steps_taken, config.max_num_steps):
        with timer.phase("train"):
            metrics = step(policy, prepare(next(demonstrations)))
        version += 1
        yield {**metrics, "version": version, **timer.lap()}


def prepare(demonstrations: Sequence[Demonstration]) -> Examples:
    """Pad to one width; only the answers are trainable."""
    padded = pad(
        [demonstration.tokens for demonstration in demonstrations],
        answer_starts=[demonstration.prompt_length for demonstration in demonstrations],
    )
    return Examples(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer)


def step(policy: Policy, examples: Examples) -> dict[str, float]:
    """Take one optimizer step on `examples`, those of every rank; return what to log.

    Raises:
        ValueError: no token is trainable, so that the loss would be 0 / 0.
    """
    num_tokens = examples.trainable.sum()
    if not num_tokens:
        raise ValueError(f"none of the {examples.tokens.numel()} tokens of this step is trainable")
    sums = policy.forward_backward(examples, functools.partial(_loss, num_tokens=num_tokens))
    grad_norm = policy.optim_step()
    return {"loss": (sums["loss"] / num_tokens).item(), "grad_norm": grad_norm, "trained_tokens": num_tokens.item()}


def _loss(
    logp: Float[Tensor, "B T"], examples: Examples, *, num_tokens: Int[Tensor, ""]
) -> tuple[Float[Tensor, ""], Sums]:
    total = -torch.where(examples.trainable, logp, 0.0).sum()
    return total / num_tokens, {"loss": total.detach()}
