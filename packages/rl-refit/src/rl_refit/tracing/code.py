"""Numbers of elements, spelled one digit at a time in values that every dtype concerned holds exactly.

Pass `k` of a code in base b gives element i the value 1 + (i // bᵏ) % b. Two more passes follow: the complement b + 1 −
value of the first digit, and 1 + h(i) % b with a hash h that is no linear function of i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Code", "as_integers", "mark", "marked", "values_held"]

_MAX_BITS = 20
_MASK = (1 << 31) - 1
_ODD = 0x9E3779B1
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def values_held(dtype: torch.dtype) -> int:
    """The n for which `dtype` holds 1, 2, … n exactly and at least two values more; 0 where that is too few."""
    if dtype in _INTEGERS:
        return torch.iinfo(dtype).max - 1
    if dtype in _FLOATS:
        return round(2 / torch.finfo(dtype).eps)
    return 0


@dataclass(frozen=True, slots=True)
class Code:
    """How the numbers 0 … `total` − 1 are spelled."""

    bits: int
    """Of a digit; the base is 2 to the power of it."""

    total: int

    @classmethod
    def for_dtypes(cls, dtypes: Iterable[torch.dtype], total: int) -> Code:
        """The largest base that all of `dtypes` hold, of those that hold any."""
        held = [count for count in map(values_held, dtypes) if count]
        return cls(min(_MAX_BITS, min(held, default=2).bit_length() - 1), total)

    @property
    def base(self) -> int:
        """The largest value."""
        return 1 << self.bits

    @property
    def digits(self) -> int:
        """Passes that spell the number."""
        return max(1, -(-max(0, self.total - 1).bit_length() // self.bits))

    @property
    def passes(self) -> int:
        """Passes in all."""
        return self.digits + 2

    def values(self, number: Tensor, which: int) -> Tensor:
        """The value of each int64 `number` in pass `which`, int64 from 1 to `base`."""
        last = self.base - 1
        if which < self.digits:
            return number.bitwise_right_shift(which * self.bits).bitwise_and_(last).add_(1)
        if which == self.digits:
            return number.bitwise_and(last).neg_().add_(self.base)
        residue = number.bitwise_and(_MASK)
        hashed = residue.mul_(residue).add_(number)  # below 2⁶³
        return hashed.bitwise_xor_(hashed >> 17).mul_(_ODD).bitwise_right_shift_(23).bitwise_and_(last).add_(1)


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
