"""Ascending positions as small numbers: the gaps between them, in one, two or four bytes each.

A gap is how many positions were passed over since the last one. With units of w bytes a gap g is written as g // E
units of the value E = 2**(8 w) - 1, each of which skips E positions, and one of g % E. Of the three widths the one that
takes the fewest bytes is used: for a share d of random positions, one byte a position and a little more from about d =
0.5 % upwards, two bytes below.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WIDTHS", "pack_gaps", "unpack_gaps"]

WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of a unit, and the dtype in which it is kept."""


def pack_gaps(gaps: Tensor) -> tuple[int, Tensor]:
    """The width and the units of `gaps`, int64 [n], none of them negative; units are of the dtype of their width."""
    wide = gaps[gaps >= _escape(1)]  # few: the others take one unit of any width
    width = min(WIDTHS, key=lambda each: each * (gaps.numel() + int((wide // _escape(each)).sum())))
    escape = _escape(width)
    if not int((wide >= escape).sum()):
        return width, _narrow(gaps, width)
    skips = gaps // escape
    ends = torch.arange(gaps.numel(), device=gaps.device) + skips.cumsum(0)
    units = torch.full((int(ends[-1]) + 1,), escape, dtype=torch.int64, device=gaps.device)
    return width, _narrow(units.index_copy_(0, ends, gaps - skips * escape), width)


def unpack_gaps(units: Tensor, width: int) -> Tensor:
    """The positions, int64 [n], that `pack_gaps` wrote as `units` of `width` bytes."""
    values = units.to(torch.int64)
    if width > 1:
        values &= _escape(width)  # the dtype is signed
    ends = values != _escape(width)
    reached = values.add_(ends).cumsum(0).sub_(1)
    return reached if bool(ends.all()) else reached[ends]


def _escape(width: int) -> int:
    return int(2 ** (8 * width) - 1)


def _narrow(units: Tensor, width: int) -> Tensor:
    """The low `width` bytes of each; a conversion to a signed dtype would have to overflow."""
    if width == 1:
        return units.to(torch.uint8)
    return units.view(WIDTHS[width])[:: 8 // width].clone()
