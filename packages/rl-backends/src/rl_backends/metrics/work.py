"""What a step has to do: tokens, microbatches and FLOPs, from a batch and its cut over all ranks.

Pure arithmetic on the host: every rank knows the whole batch and the whole cut, so that no rank is asked for anything.

Axes: B rows of the batch, T tokens, R rows that are read (those of repeated microbatches again).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from rl_backends.batching.microbatches import Layout, Microbatch
from rl_backends.metrics.flops import ModelFlops

__all__ = ["Work", "work_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all ranks together, unless said otherwise."""

    tokens: int
    """Of rows, without padding."""

    tokens_read: int
    """That the model computes: with padding, and with microbatches that are repeated to keep ranks in step."""

    asked_tokens: int
    """That something is wanted of."""

    microbatches: int
    """Of each rank; all have equally many."""

    repeated_microbatches: int
    """That do not count."""

    model_flops: float | None
    """That the mathematics needs; None where the model does not tell."""

    hardware_flops: float | None
    """That the devices compute: padding, repetitions and what is recomputed included."""

    rank_costs: tuple[float, ...]
    """Of each rank's own rows as they are read, padding included and repetitions not: FLOPs, or tokens where FLOPs are
    not known."""

    def __add__(self, other: "Work") -> "Work":
        both = None if self.model_flops is None or other.model_flops is None else self.model_flops + other.model_flops
        hard = (
            None
            if self.hardware_flops is None or other.hardware_flops is None
            else self.hardware_flops + other.hardware_flops
        )
        return Work(
            tokens=self.tokens + other.tokens,
            tokens_read=self.tokens_read + other.tokens_read,
            asked_tokens=self.asked_tokens + other.asked_tokens,
            microbatches=self.microbatches + other.microbatches,
            repeated_microbatches=self.repeated_microbatches + other.repeated_microbatches,
            model_flops=both,
            hardware_flops=hard,
            rank_costs=tuple(a + b for a, b in zip(self.rank_costs, other.rank_costs, strict=True)),
        )

    @property
    def padding_share(self) -> float:
        """Of the tokens that are read, those that no row has."""
        return 1.0 - self.tokens / self.tokens_read if self.tokens_read else 0.0

    @property
    def load_balance(self) -> float:
        """The most expensive rank over the mean: 1 is perfect, 2 leaves half of the machine waiting."""
        total = sum(self.rank_costs)
        return max(self.rank_costs) * len(self.rank_costs) / total if total else 1.0


def work_of(
    cut: Sequence[Sequence[Microbatch]],
    *,
    lengths: Int[Tensor, " B"],
    asked: Int[Tensor, " B"],
    flops: ModelFlops | None,
    layout: Layout,
    token_multiple: int = 1,
    recomputed: bool = False,
) -> Work:
    """Add up what `cut` makes all ranks do.

    Args:
        cut: microbatches of each data-parallel rank, as `cut_all` gives them.
        lengths: tokens of each row of the batch that are not padding.
        asked: tokens of each row that something is wanted of.
        flops: what a token of the model costs; None where that is not known.
        layout: whether rows are padded to the longest of their microbatch.
        token_multiple: what a row is rounded up to: 2 · ranks under context parallelism.
        recomputed: whether backward computes the layers again.
    """
    microbatches = [each for rank in cut for each in rank]
    sizes = torch.tensor([len(each.rows) for each in microbatches])
    rows = torch.cat([each.rows for each in microbatches]) if microbatches else torch.zeros(0, dtype=torch.int64)
    counted = torch.tensor([each.counted for each in microbatches]).repeat_interleave(sizes)
    rank = torch.tensor([r for r, each in enumerate(cut) for _ in each]).repeat_interleave(sizes)
    real, wanted = lengths[rows], asked[rows]
    read = -(-real // token_multiple) * token_multiple
    if layout == "padded":
        widths = [-(-each.width // token_multiple) * token_multiple for each in microbatches]
        read = torch.tensor(widths).repeat_interleave(sizes)
    cost = read.double() if flops is None else flops.of_rows(read, wanted)
    costs = torch.zeros(len(cut), dtype=torch.float64).index_add_(0, rank, cost * counted)
    # The head makes its logits a second time in backward always; the layers only where they are checkpointed.
    again = 0.0 if flops is None else float(wanted.sum()) * flops.head.forward * (not recomputed)
    return Work(
        tokens=int((real * counted).sum()),
        tokens_read=int(read.sum()),
        asked_tokens=int((wanted * counted).sum()),
        microbatches=max(map(len, cut), default=0),
        repeated_microbatches=sum(not each.counted for each in microbatches),
        model_flops=None if flops is None else float((flops.of_rows(real, wanted) * counted).sum()),
        hardware_flops=None
        if flops is None
        else float((flops.of_rows(read, wanted, recomputed=True) if recomputed else cost).sum()) + again,
        rank_costs=tuple(costs.tolist()),
    )
