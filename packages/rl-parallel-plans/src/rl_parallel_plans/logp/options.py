"""What is done to logits before the softmax, and how many rows of them exist at one time.

x = cap(logit_scale * logits) / temperature          cap(y) = softcap * tanh(y / softcap)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""Most bytes of a chunk's logits where the caller names no chunk size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of the public functions, checked."""

    temperature: float = 1.0
    chunk_size: int | None = None
    entropy: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size}: it must be at least 1 row, or None")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}: it must be above 0, or None")

    def rows_at_a_time(self, num_rows: int, words: int, dtype: torch.dtype) -> int:
        """The caller's, or an eighth of the rows: at least 256, that a multiplication is worth its weight's reading.

        At most 1024, beyond which nothing is won, and `CHUNK_BYTES`. Ranks may differ: no collective is per chunk.
        """
        if self.chunk_size is not None:
            return self.chunk_size
        fitting = CHUNK_BYTES // max(1, words * dtype.itemsize)
        return max(1, min(fitting, 1024, max(256, num_rows // 8)))

    def transform_(self, logits: Tensor) -> Tensor:
        """`x` of raw logits, in their place."""
        if self.logit_scale != 1.0:
            logits = logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.div_(self.temperature) if self.temperature != 1.0 else logits

    def slope(self, x: Tensor) -> Tensor | float:
        """dx/dlogits: a number, or a tensor like x under a softcap."""
        factor = self.logit_scale / self.temperature
        if self.softcap is None:
            return factor
        return (x * (self.temperature / self.softcap)).square_().neg_().add_(1.0).mul_(factor)


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """fp32 for anything narrower, else the tensor's own."""
    return torch.promote_types(tensor.dtype, torch.float32)
