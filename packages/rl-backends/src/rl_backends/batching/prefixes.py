"""Rows that begin alike, read once: the prompt of a group of rollouts, and what their answers have in common.

A token's hidden state is a function of the tokens of its row up to itself. Rows that are equal up to there have it in
common, so the model reads a tree instead of rows: each token once for all rows that have come to it the same way. Only
attention needs rows, and unfolds them: it alone costs what it costs without sharing. Gradients add up where rows meet.

    rows      1 5 9 2      the tree, read as one pack      1 5 9 2 4 7
              1 5 4 7                                      places of its rows: 0 1 2 3, 0 1 4 5, 0 1 4
              1 5 4

All of it is arithmetic on the host.

Axes: b rows of a microbatch, w tokens of its longest, t tokens that are left to read, N tokens of all rows.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from rl_backends.batching.microbatches import ModelInputs

_MULTIPLE = 4  # rows unfold to lengths of multiples of it: attention runs once for all rows of one length


def make_shared_inputs(
    tokens: Int[Tensor, "b w"],
    lengths: Int[Tensor, " b"],
    asked: Bool[Tensor, "b w"],
    *,
    offset: int = 1,
    words: Int[Tensor, "b w k"] | None = None,
) -> ModelInputs:
    """What the model reads of right-padded rows on the host, what they begin with alike once; see `make_inputs`."""
    # The rows in an order in which those that begin alike are neighbours.
    own = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    alike = torch.tensor(sorted(range(len(own)), key=own.__getitem__))
    place, is_first = _tree(tokens[alike], lengths[alike])
    unfolded, starts = _unfolded(place, lengths[alike])
    place = place[alike.argsort()]
    rows, columns = asked.nonzero(as_tuple=True)
    return ModelInputs(
        tokens=tokens[alike][is_first][None],
        position_ids=is_first.nonzero()[None, :, 1],
        cu_seq_lens=starts,
        longest=int(starts.diff().max()),
        row_lengths=tuple(starts.diff().tolist()),
        at=place[rows, columns - offset],
        targets=tokens[rows, columns],
        into=rows * tokens.shape[1] + columns,
        words=None if words is None else words[rows, columns],
        places_of_rows=unfolded,
        # For each place of the pack the first of the unfolded rows' tokens that is read there.
        places_of_pack=unfolded.new_full((int(is_first.sum()),), len(unfolded)).scatter_reduce(
            0, unfolded, torch.arange(len(unfolded)), reduce="amin"
        ),
    )


def _tree(tokens: Tensor, lengths: Tensor) -> tuple[Int[Tensor, "b w"], Bool[Tensor, "b w"]]:
    """Where in the pack each token of alphabetical rows is read, and whether its row is the first that has it."""
    columns = torch.arange(tokens.shape[1])
    real = columns < lengths[:, None]
    same = (tokens[1:] == tokens[:-1]) & real[1:] & real[:-1]
    is_first = real & ~F.pad(same.long().cumprod(1).bool(), (0, 0, 1, 0))
    number = torch.where(is_first, is_first.flatten().cumsum(0).view_as(is_first) - 1, -1)
    return number.cummax(0).values, is_first  # the latest row that had something new in this column is the one it joins


def _unfolded(place: Tensor, lengths: Tensor) -> tuple[Int[Tensor, " N"], Int[Tensor, " b_and_one"]]:
    """Places of rows one after the other, longest first, and where each begins; each ends with its last token again.

    A row that the next one begins with is left out: all that is read of it is read there too.
    """
    shared = (place[1:] == place[:-1]) & (torch.arange(place.shape[1]) < lengths[1:, None])
    beginning = F.pad(shared.sum(1) == lengths[:-1], (0, 1))
    order = lengths.argsort(descending=True, stable=True)
    order = order[~beginning[order]]
    held = _MULTIPLE * -(-lengths[order] // _MULTIPLE)
    columns = torch.arange(int(held.max())).expand(len(held), -1)
    wanted = torch.minimum(columns, lengths[order, None] - 1)
    return place[order].gather(1, wanted)[columns < held[:, None]], F.pad(held.cumsum(0), (1, 0)).to(torch.int32)
