"""Log-probabilities of whole answers, under the policy and under the reference that it is compared with.

Axes: B rows, T tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.contracts import Reference, TokenBatch
from rl_algorithms.stepping import take_rows

__all__ = ["answer_logp", "with_reference"]

ComparedT = TypeVar("ComparedT", bound=TokenBatch)


def answer_logp(logp: Float[Tensor, "B T"], trainable: Bool[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Log-probability of each row's trainable tokens together. What stands elsewhere, even NaN, is not looked at."""
    return torch.where(trainable, logp, 0.0).sum(dim=1)


def with_reference(
    reference: Reference, examples: ComparedT, *, rows_at_once: int = 4096, between: Callable[[], object] = lambda: None
) -> ComparedT:
    """The same examples, compared with `reference` as it is now: a frozen model, or the policy before its first step.

    Rows of like length are asked together, so that none is padded to the longest of all.

    Args:
        reference: is asked once for each row.
        examples: a dataclass with a field `logp_ref`, float [B].
        rows_at_once: in one call of the reference at most, but never less than a pair.
        between: called after each of these calls; a run may be interrupted there.
    """
    logp, size = torch.empty(len(examples.tokens)), type(examples).rows_per_unit
    longest = examples.lengths.reshape(-1, size).amax(dim=1)
    by_length = longest.argsort(stable=True)
    for units in torch.split(by_length, max(1, rows_at_once // size)):
        rows = (size * units.sort().values[:, None] + torch.arange(size)).flatten()  # in their own order
        part = take_rows(examples, rows)
        answers = answer_logp(reference.logp(part), part.trainable)
        logp = logp.to(answers)  # its dtype and device
        logp[rows.to(answers.device)] = answers
        between()
    instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
    compared: ComparedT = replace(instance, logp_ref=logp)
    return compared
