"""From a loss per token to the loss of a step: how tokens and rows are weighed against one another.

    token-mean                 sum_i sum_t l[i,t] / N_tok                            DAPO; every token counts the same
    seq-mean-token-mean        sum_i (sum_t l[i,t] / T_i) / N_seq                    GRPO, GSPO; every answer the same
    seq-mean-token-sum         sum_i sum_t l[i,t] / N_seq                            RLOO, REINFORCE
    seq-mean-token-sum-norm    sum_i sum_t l[i,t] / (N_seq L)                        Dr.GRPO; L a constant of the run

N_tok and N_seq count the trainable tokens, and the rows that have any, of the whole optimizer step, over every
microbatch and every rank. Parts of a step then add up to it, however it was cut. Names are verl's.

Where others differ: for `grpo` and `dr_grpo` TRL divides by all rows, those without a trainable token (masked as cut
off) included, and its L is `max_completion_length`; verl's L is `loss_scale_factor`, or the padded width of the batch
where that is not set, in old versions always. Here L is asked for.

Axes: B rows, T tokens.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from rl_algorithms.objective import Aggregation

__all__ = ["Counts", "token_weights"]


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
    mask: Bool[Tensor, "B T"], aggregation: Aggregation, counts: Counts, *, max_length: int | None = None
) -> Float[Tensor, "B T"]:
    """What each token of some rows of a step weighs in its loss; float64, 0 off the mask. No row, no weight, no NaN.

    Args:
        mask: the trainable tokens of these rows, each row whole.
        aggregation: see above.
        counts: of the whole step.
        max_length: L of `"seq-mean-token-sum-norm"`, in tokens; the longest answer that the run allows.

    Raises:
        ValueError: `max_length` is missing where it is needed.
    """
    tokens, sequences = max(counts.tokens, 1), max(counts.sequences, 1)
    weights = mask.double()
    if aggregation == "token-mean":
        return weights / tokens
    if aggregation == "seq-mean-token-mean":
        return weights / mask.sum(dim=1, keepdim=True).clamp(min=1) / sequences
    if aggregation == "seq-mean-token-sum":
        return weights / sequences
    if max_length is None:
        raise ValueError(
            "aggregation='seq-mean-token-sum-norm' divides by a constant length and max_length is None; "
            "set it to the longest answer that the run allows, in tokens"
        )
    return weights / (sequences * max_length)
