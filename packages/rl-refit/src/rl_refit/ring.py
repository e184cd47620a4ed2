"""A fixed ring of byte slots, allocated once, through which every bucket passes.

Knows no names and no routes. A piece appears as a tensor of its own dtype and shape that looks into a slot.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from rl_refit.buckets import Piece

__all__ = ["SlotRing"]


@final
class SlotRing:
    """`slots` buffers of `bucket_bytes` each on `device`; bucket i uses slot i modulo `slots`."""

    def __init__(self, *, slots: int, bucket_bytes: int, device: torch.device) -> None:
        # No page is touched before the first bucket: a small model pays for its own bytes only.
        self._slots = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(slots)]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.numel() for slot in self._slots)

    def view(self, bucket: int, piece: Piece, dtype: torch.dtype) -> Tensor:
        """The place of `piece` in the slot of bucket number `bucket`, as `dtype` and in the shape of the piece."""
        slot = self._slots[bucket % len(self._slots)]
        return slot[piece.start : piece.start + piece.nbytes].view(dtype).view(piece.region.shape)
