"""Numbers of elements, spelled one digit at a time in values that every dtype concerned holds exactly.

Knows no engine. Pass `k` of a code in base b gives element i the value 1 + (i // bᵏ) % b. Two more passes follow: the
complement b + 1 − value of the first digit, and 1 + h(i) % b with a hash h that is no linear function of i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Code", "as_integers", "mark", "marked", "values_held"]

_PRIME = (1 << 31) - 1
_MAX_BASE = 1 << 20
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def values_held(dtype: torch.dtype) -> int:
    """The n for which `dtype` holds 1, 2, … n exactly, at most 2²⁰; 0 where that is too few to spell with."""
    if dtype in _INTEGERS:
        return min(torch.iinfo(dtype).max - 1, _MAX_BASE)
    if dtype in _FLOATS:
        return min(round(2 / torch.finfo(dtype).eps), _MAX_BASE)
    return 0


@dataclass(frozen=True, slots=True)
class Code:
    """How the numbers 0 … `total` − 1 are spelled."""

    base: int
    total: int

    @property
    def digits(self) -> int:
        """Passes that spell the number."""
        count = 1
        while self.base**count < self.total:
            count += 1
        return count

    @property
    def passes(self) -> int:
        """Passes in all."""
        return self.digits + 2

    def values(self, number: Tensor, which: int) -> Tensor:
        """The value of each int64 `number` in pass `which`, int64 from 1 to `base`."""
        if which < self.digits:
            return number.div(self.base**which, rounding_mode="floor").remainder(self.base).add(1)
        if which == self.digits:
            return number.remainder(self.base).neg().add(self.base)
        residue = number.remainder(_PRIME)
        hashed = residue.mul(residue).add(12_345).remainder(_PRIME)  # the product is below 2⁶²
        return hashed.div(61, rounding_mode="floor").remainder(self.base).add(1)


def mark(tensor: Tensor, which: int) -> None:
    """Fill `tensor` with what no code uses as a value, and what differs from pass to pass."""
    if values_held(tensor.dtype):
        tensor.fill_(_mark(tensor.dtype, which))
    else:
        as_integers(tensor).fill_(which % 2)


def marked(tensor: Tensor, which: int) -> Tensor:
    """Where `tensor` has what `mark` put there."""
    if values_held(tensor.dtype):
        return tensor == _mark(tensor.dtype, which)
    return as_integers(tensor) == which % 2


def as_integers(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype, as integers of the same size, in the same memory."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_SAME_SIZE[real.element_size()])


def _mark(dtype: torch.dtype, which: int) -> int:
    if dtype == torch.uint8:
        return 255 * (which % 2)
    return -1 - which % 2
