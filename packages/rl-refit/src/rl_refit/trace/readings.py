"""What one tensor of an engine held after each pass of a trace, added up to a map.

Knows no loader. Keeps, for each element, the number spelled so far and three facts: whether every value so far was one
of the code's, whether it still had the mark of each pass, and whether it was the same in every pass. A tensor of which
no element is written costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_refit.trace.code import Code, marked, values_held

__all__ = ["FILLED", "NEVER_WRITTEN", "Readings"]

NEVER_WRITTEN = -1
"""In a map: the loader left the element alone."""

FILLED = -2
"""In a map: the loader set the element by itself."""

_CHUNK = 1 << 22
_COPIED, _MARKED, _SAME = 1, 2, 4


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
        flat = flat.to("cpu", copy=True)
        if self._read is None:
            self._read = _Read.of(flat, self._code, first_pass=which == 0)
        for chunk in _chunks(flat.numel()):
            self._read.add(flat[chunk], self._code, chunk=chunk, which=which)

    def map(self) -> tuple[Tensor, Tensor]:
        """The number of each element, int64 and of the tensor's shape, and where there is none that makes sense."""
        shape = self.tensor.shape
        if self._read is None:
            return torch.full(shape, NEVER_WRITTEN), torch.zeros(shape, dtype=torch.bool)
        number = self._read.number.to(torch.int64)
        copied, is_marked, same = (self._read.facts & fact != 0 for fact in (_COPIED, _MARKED, _SAME))
        number[~copied & same] = FILLED
        number[~copied & is_marked] = NEVER_WRITTEN
        return number.view(shape), ~(copied | is_marked | same).view(shape)

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
        dtype = torch.int32 if code.total < 1 << 31 else torch.int64
        return cls(flat, torch.zeros(flat.shape, dtype=dtype), torch.full(flat.shape, facts, dtype=torch.uint8))

    def add(self, raw: Tensor, code: Code, *, chunk: slice, which: int) -> None:
        value, is_value = _values(raw, code.base)
        number = self.number[chunk].to(torch.int64)
        if which < code.digits:
            number += (value - 1) * code.base**which
            self.number[chunk] = number.clamp(max=code.total).to(self.number.dtype)
            is_value &= number < code.total
        else:
            is_value &= code.values(number, which) == value
        seen = is_value * _COPIED + marked(raw, which) * _MARKED + (raw == self.first[chunk]) * _SAME
        self.facts[chunk] &= seen.to(torch.uint8)


def _values(raw: Tensor, base: int) -> tuple[Tensor, Tensor]:
    """`raw` as int64, and where it is one of the integers 1 … `base`; 1 elsewhere."""
    wide = raw.to(torch.float64) if raw.is_floating_point() else raw.to(torch.int64)
    is_value = (wide >= 1) & (wide <= base)
    if wide.is_floating_point():
        is_value &= wide == wide.floor()
    return torch.where(is_value, wide, 1).to(torch.int64), is_value


def _chunks(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, numel)) for start in range(0, numel, _CHUNK))
