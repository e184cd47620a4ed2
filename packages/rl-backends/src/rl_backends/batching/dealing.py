"""Deal the rows of a batch to the data-parallel ranks before it is sent, so that each rank receives its own alone.

    driver   RowDealing.deal(examples) -> DealtRows of each data-parallel rank ─► its ranks
    rank     any method of a model that takes a batch takes DealtRows; what it reads comes back for its own rows
    driver   in_order(dealt, what each data-parallel rank returned) -> for all rows, in the order of the batch

Ranks with one data-parallel rank (those of its tensor, context and pipeline parallelism) get the same rows. The cut,
`RowDealing.cut`, balances rows by length, and each rank makes it again from the lengths of all rows; so every
microbatch, and every number, is what it is where each rank is given the whole batch.

Every rank gets equally many microbatches, because the collectives of a sharded model must be entered by all ranks
equally often: a rank with too few rows repeats the shortest one of the batch and does not count it. First as few
microbatches as the bounds allow; then, of as many as all ranks must have, alike ones, because the largest decides the
memory of a step. Ties go by index, and costs are integers.

Axes: B rows of the batch, b of them that a rank is given, T tokens.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic

import torch
from jaxtyping import Int
from torch import Tensor

from rl_backends.batching.microbatches import (
    Layout,
    Microbatch,
    packed_groups,
    padded_groups,
    row_cost,
    share_out,
)
from rl_backends.errors import BatchError
from rl_backends.examples import BatchT, TokenBatch, changed, check_examples, require_token_ids
from rl_parallel_plans import TopKLogp


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtRows(Generic[BatchT]):
    """The rows of a batch that one data-parallel rank computes, and what it must know of the others."""

    rank: int
    """The data-parallel rank that they are for."""
    rows: Int[Tensor, " b"]
    """Their numbers in the batch, ascending. One that is repeated to keep ranks in step is among them."""
    examples: BatchT
    lengths: Int[Tensor, " B"]
    """Tokens of every row of the batch."""
    asked: Int[Tensor, " B"]
    """Trainable tokens of every row of the batch."""


def trainable_of(examples: TokenBatch | DealtRows[Any]) -> Tensor:
    """Which tokens train, `[B, T]`, or how many of each row, `[B]`, where no rank has all of them."""
    return examples.asked if isinstance(examples, DealtRows) else examples.trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDealing:
    """Which rows of a batch are a rank's, and what its model takes as one. Ranks differ in `rank` alone."""

    rank: int
    """This rank's number among those with rows of their own."""
    num_ranks: int
    """How many have rows of their own."""
    micro_batch_size: int = 64
    """Most rows of a microbatch."""
    micro_batch_tokens: int | None = None
    """Most tokens of one as the model reads them, padding included; None bounds by rows alone."""
    layout: Layout = "padded"
    """Whether rows are padded to the longest of their microbatch, or laid one after the other."""
    fewest_microbatches: int = 1
    """Of a rank: a schedule of virtual pipeline stages needs as many as there are stages."""
    token_multiple: int = 1
    """What the length of a row is rounded up to: 2 · ranks under context parallelism."""
    vocabulary_size: int = sys.maxsize
    """Ids of tokens are below it."""
    max_positions: int | None = None
    """Tokens of the longest row that the model has positions for; None where it has no table of them."""
    media_tokens: Mapping[int, str] = field(default_factory=dict)
    """Ids of tokens in whose place the model reads images, and their names."""

    def cut(self, examples: TokenBatch, *, with_token_ids: bool = False) -> list[list[Microbatch]]:
        """The microbatches of every data-parallel rank, equally many, those with most tokens first.

        Their rows are in numbers of the batch.

        with_token_ids: `examples.token_ids` will be asked about.

        Raises:
            BatchError: the examples cannot be cut or read.
        """
        lengths: list[int] = examples.lengths.tolist()
        check_examples(examples, lengths, most_rows=self.micro_batch_size, vocabulary_size=self.vocabulary_size)
        if with_token_ids:
            require_token_ids(examples, vocabulary_size=self.vocabulary_size)
        if self.max_positions is not None and (longest := max(lengths)) > self.max_positions:
            raise BatchError(
                f"row {lengths.index(longest)} has {longest} tokens, and the model has a table of "
                f"{self.max_positions} positions: shorten the row, or choose a model for longer ones"
            )
        for token, name in self.media_tokens.items():
            if bool((found := examples.tokens == token).any()):
                row, column = found.nonzero()[0].tolist()
                raise BatchError(
                    f"row {row}: token {column} is {token}, the model's {name}, in whose place it reads images (or "
                    f"video, or sound), and this backend gives it none: train on rows of text alone"
                )
        return self.cut_lengths(lengths, rows_per_unit=examples.rows_per_unit)

    def cut_lengths(self, lengths: Sequence[int], *, rows_per_unit: int) -> list[list[Microbatch]]:
        """The same of rows of which nothing is known but their `lengths`."""
        # Tokens that the model reads of each unit, where it is alone in a microbatch.
        unit, packed = rows_per_unit, self.layout == "packed"
        units = [lengths[start : start + unit] for start in range(0, len(lengths), unit)]
        if packed:
            tokens = [sum(self.token_multiple * -(-length // self.token_multiple) for length in rows) for rows in units]
        else:
            tokens = [unit * self.token_multiple * -(-max(rows) // self.token_multiple) for rows in units]
        if self.micro_batch_tokens is not None and max(tokens) > self.micro_batch_tokens:
            worst = max(range(len(tokens)), key=tokens.__getitem__)
            row = max(range(worst * unit, (worst + 1) * unit), key=lengths.__getitem__)
            together = "" if unit == 1 else f", and the {unit} rows that belong together"
            raise BatchError(
                f"row {row} has {lengths[row]} tokens{together}: {tokens[worst]} as the model reads them, more than "
                f"micro_batch_tokens={self.micro_batch_tokens}; raise it to {tokens[worst]}, or shorten the row"
            )

        # The units of each rank, dealt by what they cost; one rank has them all.
        shares = [list(range(len(units)))]
        if self.num_ranks > 1:
            shares = share_out([sum(map(row_cost, rows)) for rows in units], num_ranks=self.num_ranks)
        for share in shares:
            share.sort()
            share.sort(key=tokens.__getitem__, reverse=True)  # stable: ties stay in the order of the batch

        # As few microbatches as the bounds allow, then as many on every rank as on the one that needs most.
        groups = packed_groups if packed else padded_groups
        most_units, most_tokens = self.micro_batch_size // unit, self.micro_batch_tokens
        group = partial(groups, tokens=tokens, most_units=most_units, most_tokens=most_tokens)
        ranks = [group(share) for share in shares]
        number = max(self.fewest_microbatches, *map(len, ranks))
        ranks = [
            own if len(own) == number else group(share, number=number) for share, own in zip(shares, ranks, strict=True)
        ]
        number = max(self.fewest_microbatches, *map(len, ranks))

        # A rank with fewer repeats the shortest unit, uncounted.
        shortest = min(range(len(units)), key=lambda index: (tokens[index], index))
        cut: list[list[Microbatch]] = []
        for own in ranks:
            cut.append([])
            for index in range(number):
                counted = index < len(own)
                rows = [each * unit + row for each in (own[index] if counted else [shortest]) for row in range(unit)]
                cut[-1].append(Microbatch(torch.tensor(rows), max(lengths[row] for row in rows), counted))
        return cut

    def deal(self, examples: BatchT, *, with_token_ids: bool = False) -> list[DealtRows[BatchT]]:
        """The rows of every data-parallel rank.

        Raises:
            BatchError: the examples cannot be cut or read; no rank was given any.
        """
        cut = self.cut(examples, with_token_ids=with_token_ids)
        lengths, asked = examples.lengths.cpu(), examples.trainable.sum(dim=1).cpu()
        dealt = []
        for rank, microbatches in enumerate(cut):
            rows = _rows_of(microbatches)
            taken = changed(examples, partial(_taken, rows))
            dealt.append(DealtRows(rank=rank, rows=rows, examples=taken, lengths=lengths, asked=asked))
        return dealt

    def cut_of(self, dealt: DealtRows[Any]) -> tuple[list[list[Microbatch]], list[Microbatch]]:
        """The cut that `dealt` comes from, in numbers of the batch; and this rank's part of it, in numbers of `dealt`.

        Raises:
            BatchError: they were dealt to another rank, or by other rules.
        """
        if dealt.rank != self.rank:
            raise BatchError(
                f"these rows were dealt to data-parallel rank {dealt.rank}, and this is {self.rank}: give each rank "
                f"its own of what RowDealing.deal returned"
            )
        cut = self.cut_lengths(dealt.lengths.tolist(), rows_per_unit=dealt.examples.rows_per_unit)
        own = cut[self.rank]
        if not torch.equal(_rows_of(own), dealt.rows):
            raise BatchError(
                f"data-parallel rank {self.rank} was given other rows than it computes: they were dealt by another "
                f"model's RowDealing, whose microbatches or ranks are not this one's"
            )
        return cut, [replace(each, rows=torch.searchsorted(dealt.rows, each.rows)) for each in own]


def _taken(rows: Tensor, _: str, tensor: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device))


def _rows_of(microbatches: Sequence[Microbatch]) -> Int[Tensor, " b"]:
    return torch.tensor(sorted({row for microbatch in microbatches for row in microbatch.rows.tolist()}))


def in_order(dealt: Sequence[DealtRows[Any]], values: Sequence[Any]) -> Any:
    """What data-parallel ranks have read of their own rows, for all rows in the order of the batch.

    Args:
        dealt: to each of them.
        values: of each, as the methods of a backend return them: a tensor `[b, ...]`, or a `TopKLogp`. A row that a
            rank repeated is 0 there.
    """
    first = values[0]
    if isinstance(first, TopKLogp):
        logp, token_ids = ([getattr(each, name) for each in values] for name in ("logp", "token_ids"))
        return TopKLogp(logp=in_order(dealt, logp), token_ids=in_order(dealt, token_ids))
    whole = first.new_zeros(len(dealt[0].lengths), *first.shape[1:])
    for each, value in zip(dealt, values, strict=True):
        whole[each.rows] += value
    return whole
