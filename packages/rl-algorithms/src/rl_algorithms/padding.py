"""Ragged rows to rectangular tensors, and rows picked out of them. Knows no loss.

Axes: B rows, T tokens.
"""

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_algorithms.contracts import TokenBatch

__all__ = ["PaddedRows", "float_tensor", "int_tensor", "pad", "take_rows"]

ExamplesT = TypeVar("ExamplesT", bound=TokenBatch)


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
    tokens[filled] = int_tensor(itertools.chain.from_iterable(rows))
    answer = filled & (position >= torch.tensor(answer_starts)[:, None])
    return PaddedRows(tokens=tokens, lengths=lengths, answer=answer)


def int_tensor(values: Iterable[int]) -> Int[Tensor, " N"]:
    """As `torch.tensor(list(values))` in int64, in a seventh of its time.

    >>> int_tensor(range(3))
    tensor([0, 1, 2])
    """
    return _tensor(array("q", values), torch.int64)


def float_tensor(values: Iterable[float]) -> Float[Tensor, " N"]:
    """As `torch.tensor(list(values))` in float32, in a seventh of its time."""
    return _tensor(array("f", values), torch.float32)


def _tensor(values: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)


def take_rows(examples: ExamplesT, rows: Tensor) -> ExamplesT:
    """The same dataclass with only `rows` (indices or a mask along B) of every tensor."""
    instance = cast("Any", examples)  # the protocol cannot say that it is a dataclass
    taken: ExamplesT = replace(
        instance, **{field.name: getattr(instance, field.name)[rows] for field in fields(instance)}
    )
    return taken
