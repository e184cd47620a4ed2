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
from rl_algorithms.preferences.pairs import rows_of_pairs
from rl_algorithms.stepping import take_rows

__all__ = ["answer_logp", "match_ranks", "with_reference"]

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


def match_ranks(examples: ComparedT, logp: Float[Tensor, "B T"], *, paired: bool) -> ComparedT:
    """The pairs of a step rearranged so that each compares values of equal rank: `aot`, and `aot_unpaired` otherwise.

    Paired, each pair is compared with the reference's log-probabilities of the pair whose margin has the same rank
    there. Unpaired, each chosen answer stands beside the rejected one whose log-ratio has the same rank. The loss of
    these pairs is that of the sorted values and has its gradient, which reaches every answer through its rank; and it
    may be cut as any other.

    Args:
        examples: all pairs of the step, with a field `logp_ref`.
        logp: of the policy now.
        paired: which of the two.
    """
    logp_ref = cast("Any", examples).logp_ref  # the protocol cannot say that it has one
    said = answer_logp(logp, examples.trainable).to(logp_ref)
    if not paired:
        logratio = said - logp_ref
        chosen, rejected = (logratio[side::2].argsort(stable=True) for side in (0, 1))
        return take_rows(examples, torch.stack([2 * chosen, 2 * rejected + 1], dim=1).flatten().to(examples.tokens))
    ranked, of_reference = (
        rows_of_pairs((each[0::2] - each[1::2]).argsort(stable=True).tolist()) for each in (said, logp_ref)
    )
    matched = logp_ref.clone()
    matched[ranked] = logp_ref[of_reference]
    compared: ComparedT = replace(cast("Any", examples), logp_ref=matched)
    return compared
