"""What one tensor of an engine held after each pass of a trace, added up to a map.

Keeps, for each element, the number spelled so far and three facts: whether every value so far was one of the code's,
whether it still had the mark of each pass, and whether it was the same in every pass. A tensor of which no element is
written costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_refit.tracing.code import Code, marked, values_held

__all__ = ["FILLED", "NEVER_WRITTEN", "Readings"]

NEVER_WRITTEN = -1
"""In a map: the loader left the element alone."""

FILLED = -2
"""In a map: the loader set the element by itself."""

_CHUNK = 1 << 16
_COPIED, _MARKED, _SAME = 1, 2, 4  # bit 0, 1 and 2


class Readings:
    """The passes over one tensor of the engine."""

    def __init__(self, tensor: Tensor, code: Code) -> None:
        self.tensor = tensor
        self._code = code
        self._read: _Read | None = None
        self.untouched = True

    @property
    def spelled(self) -> bool:
        """Whether its dtype can hold the values of the code."""
        return values_held(self.tensor.dtype) > 0

    def take(self, which: int) -> None:
        """Read the tensor after pass `which`."""
        flat = self.tensor.reshape(-1)
        if self.untouched and bool(marked(flat, which).all()):
            return
        self.untouched = False
        if not self.spelled:
            return
        flat = flat.to("cpu")
        if self._read is None:
            self._read = _Read.of(flat.clone(), self._code, first_pass=which == 0)
        for chunk in _chunks(flat.numel()):
            self._read.add(flat[chunk], self._code, chunk=chunk, which=which)

    def strange(self) -> Tensor:
        """Where it holds what is no element of the checkpoint, of the tensor's shape."""
        if self._read is None:
            return torch.zeros(self.tensor.shape, dtype=torch.bool)
        return (self._read.facts == 0).view(self.tensor.shape)

    def map(self) -> Tensor:
        """The number of each element, or why it has none; int32 or int64, of the tensor's shape."""
        if self._read is None:
            return torch.full(self.tensor.shape, NEVER_WRITTEN)
        number, facts = self._read.number, self._read.facts
        if bool((facts & _COPIED == 0).any()):
            without = torch.where(facts & _SAME != 0, FILLED, NEVER_WRITTEN).to(number.dtype)
            number = torch.where(facts & _COPIED != 0, number, without)
        return number.view(self.tensor.shape)

    def free(self) -> None:
        """Drop what was read."""
        self._read = None


@dataclass(frozen=True, slots=True)
class _Read:
    """What is known of each element, one after the other in row-major order."""

    first: Tensor
    """Its value after the first pass."""

    number: Tensor
    """The digits so far."""

    facts: Tensor
    """Those of `_COPIED`, `_MARKED` and `_SAME` that have always been so."""

    @classmethod
    def of(cls, flat: Tensor, code: Code, *, first_pass: bool) -> _Read:
        # Written for the first time in a later pass: no code, no constant, and marked before.
        facts = _COPIED | _MARKED | _SAME if first_pass else _MARKED
        dtype = torch.int32 if code.total <= 1 << 30 else torch.int64
        return cls(flat, torch.zeros(flat.shape, dtype=dtype), torch.full(flat.shape, facts, dtype=torch.uint8))

    def add(self, raw: Tensor, code: Code, *, chunk: slice, which: int) -> None:
        value = raw.to(torch.int32)
        is_value = (value.to(raw.dtype) == raw).logical_and_(value >= 1).logical_and_(value <= code.base)
        number = self.number[chunk]
        if which < code.digits:
            shift = which * code.bits
            digit = value.sub_(1)
            is_value.logical_and_(digit <= (code.total - 1) >> shift)
            number |= digit.mul_(is_value).to(number.dtype).bitwise_left_shift_(shift)
            is_value.logical_and_(number < code.total)
        else:
            is_value.logical_and_(code.values(number.to(torch.int64), which) == value)
        same = raw == self.first[chunk]
        seen = is_value.view(torch.uint8) | marked(raw, which).view(torch.uint8) << 1 | same.view(torch.uint8) << 2
        self.facts[chunk] &= seen


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))
