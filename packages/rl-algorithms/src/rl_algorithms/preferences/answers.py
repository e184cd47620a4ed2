"""Log-probabilities of whole answers, under the policy and under the reference that it is compared with.

Axes: B rows, T tokens.
"""

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.contracts import Reference, TokenBatch

__all__ = ["answer_logp", "with_reference"]

ComparedT = TypeVar("ComparedT", bound=TokenBatch)


def answer_logp(logp: Float[Tensor, "B T"], trainable: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Log-probability of each row's trainable tokens together. What stands elsewhere, even NaN, is not looked at."""
    return torch.where(trainable, logp, 0.0).sum(dim=1)


def with_reference(reference: Reference, examples: ComparedT) -> ComparedT:
    """The same examples, compared with `reference` as it is now: a frozen model, or the policy before its first step.

    Args:
        reference: is asked once, for all of them.
        examples: a dataclass with a field `logp_ref`, float [B].
    """
    instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
    compared: ComparedT = replace(instance, logp_ref=answer_logp(reference.logp(examples), examples.trainable))
    return compared
