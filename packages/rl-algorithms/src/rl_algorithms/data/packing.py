"""Several short rows in one long one, for a trainer of your own: which go together, and the tensors.

The backends of this stack pack by themselves what a loss hands them; this is for those who take this package elsewhere.
Best-fit decreasing (Johnson 1974), as TRL's `bfd`: the longest first, each into the fullest bin that it fits; many rows
need at most 11/9 of the fewest possible bins.

Axes: B packed rows, T tokens.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rl_algorithms.rows import DataError

__all__ = ["PackedRows", "lay_out", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """Rows laid end to end, right-padded."""

    tokens: Int[Tensor, "B T"]
    """Token ids; 0 in the padding."""

    position_ids: Int[Tensor, "B T"]
    """Counted from 0 anew in each document, and in the padding. Give them to the model with a mask that keeps documents
    apart, or with none at all: beside an attention mask of ones, `transformers` lets documents see one another."""

    document_ids: Int[Tensor, "B T"]
    """Which of the rows each token belongs to, as an index into them; -1 in the padding."""

    trainable: Bool[Tensor, "B T"]
    """As handed in, but never a document's first token: what stands before it is another document."""


def pack(lengths: Sequence[int], *, capacity: int, names: Sequence[str] | None = None) -> list[list[int]]:
    """Indices of `lengths` in bins of at most `capacity` each; every index once. The same for the same lengths.

    Bins come in the order of their first row, so that long rows are not all at the beginning.

    Args:
        lengths: tokens of each row.
        capacity: tokens that fit a bin.
        names: what to call each row in an error, such as its `where`; its index otherwise.

    Raises:
        DataError: a row is longer than `capacity`, or has no tokens.

    >>> pack([3, 5, 2, 4], capacity=8)
    [[0, 1], [2, 3]]
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            name = names[index] if names else f"row {index}"
            what = "has no tokens" if length < 1 else f"has {length} tokens, and a bin holds capacity={capacity}"
            raise DataError(f"{name}: {what}; shorten it or leave it out")
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the fullest first
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect.bisect_left(free, (lengths[index], -1))
        if place == len(free):
            bins.append([])
            free.append((capacity, len(bins) - 1))
        left, number = free.pop(place)
        bins[number].append(index)
        bisect.insort(free, (left - lengths[index], number))
    return sorted(sorted(indices) for indices in bins)


def lay_out(
    rows: Sequence[Sequence[int]],
    trainable: Sequence[Sequence[bool]],
    *,
    bins: Sequence[Sequence[int]],
    width: int | None = None,
) -> PackedRows:
    """Lay `rows` end to end as `bins` say.

    Args:
        rows: token ids of each row.
        trainable: which of them the loss looks at.
        bins: indices of the rows that go together, as from `pack`.
        width: tokens of each packed row; those of the fullest bin otherwise.

    Raises:
        DataError: a row and its `trainable` differ in length, or a bin is wider than `width`.
    """
    for index, (row, mask) in enumerate(zip(rows, trainable, strict=True)):
        if len(row) != len(mask):
            raise DataError(f"row {index} has {len(row)} tokens, and its trainable {len(mask)}")
    sizes = [sum(len(rows[index]) for index in indices) for indices in bins]
    width = max(sizes, default=0) if width is None else width
    if max(sizes, default=0) > width:
        number = sizes.index(max(sizes))
        raise DataError(f"bin {number} (rows {list(bins[number])}) has {sizes[number]} tokens, and width={width}")
    shape = (len(bins), width)
    tokens, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    documents, trained = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
    for number, indices in enumerate(bins):
        start = 0
        for index in indices:
            end = start + len(rows[index])
            tokens[number, start:end] = torch.tensor(rows[index])
            positions[number, start:end] = torch.arange(end - start)
            documents[number, start:end] = index
            trained[number, start + 1 : end] = torch.tensor(trainable[index][1:], dtype=torch.bool)
            start = end
        positions[number, start:] = torch.arange(width - start)
    return PackedRows(tokens=tokens, position_ids=positions, document_ids=documents, trainable=trained)
