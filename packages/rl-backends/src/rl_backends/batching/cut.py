"""How a batch is cut over data-parallel ranks and microbatches. Pure arithmetic on the host; knows no model.

Every rank works out the whole cut from the same lengths, and takes its own part. All ranks get equally many
microbatches, because the collectives of a sharded model must be entered by all of them equally often: a rank with too
few units repeats the shortest one of the batch, and does not count it.

Axes: B rows of the batch, T tokens of its longest row. A unit is `rows_per_unit` consecutive rows, never parted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backends.batching.balance import row_cost, share_out
from rl_backends.batching.groups import Bounds, packed_groups, padded_groups
from rl_backends.batching.inputs import Layout
from rl_backends.batching.microbatch import Microbatch
from rl_backends.errors import BatchError
from rl_backends.examples import TokenBatch

__all__ = ["MicrobatchLimits", "cut", "cut_all"]

_ROWS_CHECKED_AT_A_TIME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchLimits:
    """How large a microbatch may be."""

    rows: int = 64
    """Most rows."""

    tokens: int | None = None
    """Most tokens as the model reads them, padding included; None bounds by rows alone."""

    layout: Layout = "padded"
    """Whether rows are padded to the longest of their microbatch, or laid one after the other."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows={self.rows} must be >= 1")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} must be >= 1, or None for no bound")


def cut(
    examples: TokenBatch, *, limits: MicrobatchLimits, rank: int, num_ranks: int, token_multiple: int = 1
) -> list[Microbatch]:
    """The microbatches of one rank; see `cut_all`."""
    lengths, planned = _planned(examples, limits, num_ranks=num_ranks, token_multiple=token_multiple)
    return _microbatches(planned, rank, lengths=lengths, rows_per_unit=examples.rows_per_unit)


def cut_all(
    examples: TokenBatch,
    *,
    limits: MicrobatchLimits,
    num_ranks: int,
    token_multiple: int = 1,
    vocabulary_size: int | None = None,
) -> list[list[Microbatch]]:
    """The microbatches of each rank, equally many, those with most tokens first.

    Args:
        examples: the whole batch.
        limits: of one microbatch.
        num_ranks: data-parallel ranks.
        token_multiple: what a row's tokens are rounded up to: 2 · ranks under context parallelism.
        vocabulary_size: ids are below it; None does not look at them.

    Raises:
        BatchError: no rows, rows that no model can compute, or a unit that is too large for a microbatch.
    """
    lengths, planned = _planned(examples, limits, num_ranks=num_ranks, token_multiple=token_multiple)
    if vocabulary_size is not None:
        _check_ids(examples, vocabulary_size)
    return [
        _microbatches(planned, rank, lengths=lengths, rows_per_unit=examples.rows_per_unit) for rank in range(num_ranks)
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    ranks: list[list[list[int]]]
    """Units of each microbatch of each rank."""

    shortest: int
    """The unit to repeat."""


def _planned(
    examples: TokenBatch, limits: MicrobatchLimits, *, num_ranks: int, token_multiple: int
) -> tuple[list[int], _Plan]:
    lengths = examples.lengths.tolist()
    _check_rows(examples, lengths)
    unit = examples.rows_per_unit
    _check_units(len(lengths), unit, limits)
    packed = limits.layout == "packed"
    units = [lengths[start : start + unit] for start in range(0, len(lengths), unit)] if unit > 1 else None
    tokens = _tokens_read(lengths, units, packed=packed, unit=unit, multiple=token_multiple)
    _check_tokens(tokens, lengths, limits, unit=unit)
    costs = list(map(row_cost, lengths)) if units is None else [sum(map(row_cost, rows)) for rows in units]
    bounds = Bounds(limits.rows // unit, limits.tokens)
    group = packed_groups if packed else padded_groups
    cutters = []
    for share in share_out(costs, num_ranks=num_ranks):
        share.sort()
        share.sort(key=tokens.__getitem__, reverse=True)  # stable: ties stay in the order of the batch
        cutters.append(group(share, tokens, bounds))
    number = max(len(into(0)) for into in cutters)
    shortest = min(range(len(tokens)), key=lambda unit: (tokens[unit], unit))
    return lengths, _Plan([into(number) for into in cutters], shortest)


def _tokens_read(
    lengths: list[int], units: list[list[int]] | None, *, packed: bool, unit: int, multiple: int
) -> list[int]:
    """Tokens that the model reads of each unit, where it is alone in a microbatch."""
    if packed:
        read = lengths if multiple == 1 else [multiple * -(-length // multiple) for length in lengths]
        return read if units is None else [sum(read[start : start + unit]) for start in range(0, len(read), unit)]
    longest = lengths if units is None else [max(rows) for rows in units]
    return longest if unit == multiple == 1 else [unit * multiple * -(-length // multiple) for length in longest]


def _microbatches(plan: _Plan, rank: int, *, lengths: list[int], rows_per_unit: int) -> list[Microbatch]:
    own = plan.ranks[rank]
    number = max(map(len, plan.ranks))
    out = []
    for index in range(number):
        counted = index < len(own)
        units = own[index] if counted else [plan.shortest]
        rows = [unit * rows_per_unit + row for unit in units for row in range(rows_per_unit)]
        out.append(Microbatch(torch.tensor(rows), max(lengths[row] for row in rows), counted))
    return out


def _check_rows(examples: TokenBatch, lengths: list[int]) -> None:
    if not lengths:
        raise BatchError("the batch has no rows (B=0): there is nothing to compute; do not ask with an empty batch")
    num_tokens = examples.tokens.shape[1]
    for row, length in enumerate(lengths):
        if not 1 <= length <= num_tokens:
            raise BatchError(
                f"row {row} has length {length}, where tokens hold {num_tokens}: lengths must be from 1 to that; "
                f"leave out rows without tokens"
            )
    trainable = examples.trainable
    if bool(trainable[:, 0].any()):
        row = int(trainable[:, 0].int().argmax())
        raise BatchError(f"row {row}: its first token is marked trainable, and nothing precedes it to predict it from")
    if (place := _trained_padding(trainable, examples.lengths.to(trainable.device))) is not None:
        row, column = place
        raise BatchError(
            f"row {row}: token {column} is marked trainable, and its length is {lengths[row]}: "
            f"padding is nothing to train on"
        )


def _trained_padding(trainable: Tensor, lengths: Tensor) -> tuple[int, int] | None:
    """A place beyond its row's length that is marked trainable.

    Rows of like length at a time: columns that are padding to all of them need no comparison.
    """
    for rows in torch.split(lengths.argsort(), _ROWS_CHECKED_AT_A_TIME):
        shortest, longest = int(lengths[rows[0]]), int(lengths[rows[-1]])
        padding = torch.arange(shortest, longest, device=lengths.device) >= lengths[rows, None]
        if bool(trainable[rows, longest:].any()) or bool((trainable[rows, shortest:longest] & padding).any()):
            beyond = torch.arange(trainable.shape[1], device=lengths.device) >= lengths[rows, None]
            row, column = (trainable[rows] & beyond).nonzero()[0].tolist()
            return int(rows[row]), column
    return None


def _check_ids(examples: TokenBatch, vocabulary_size: int) -> None:
    """Of tokens that are not padding; all are looked at, and rows one by one only where something is wrong."""
    tokens = examples.tokens
    if int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary_size:
        return
    real = torch.arange(tokens.shape[1], device=tokens.device) < examples.lengths.to(tokens.device)[:, None]
    wrong = (real & ((tokens < 0) | (tokens >= vocabulary_size))).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise BatchError(
            f"row {row}: token {column} has the id {int(tokens[row, column])}, and the model's ids are from 0 to "
            f"{vocabulary_size - 1}: give the tokens of the model's own tokenizer"
        )


def _check_units(num_rows: int, unit: int, limits: MicrobatchLimits) -> None:
    if num_rows % unit:
        raise BatchError(f"{num_rows} rows, of which {unit} belong together each: B must be a multiple of {unit}")
    if unit > limits.rows:
        raise BatchError(
            f"{unit} rows belong together, and a microbatch holds {limits.rows}; micro_batch_size must be at "
            f"least {unit}"
        )


def _check_tokens(tokens: list[int], lengths: list[int], limits: MicrobatchLimits, *, unit: int) -> None:
    if limits.tokens is None or not tokens or max(tokens) <= limits.tokens:
        return
    worst = max(range(len(tokens)), key=tokens.__getitem__)
    row = max(range(worst * unit, (worst + 1) * unit), key=lengths.__getitem__)
    together = "" if unit == 1 else f", and the {unit} rows that belong together"
    raise BatchError(
        f"row {row} has {lengths[row]} tokens{together}: {tokens[worst]} as the model reads them, more than "
        f"micro_batch_tokens={limits.tokens}; raise it to {tokens[worst]}, or shorten the row"
    )
