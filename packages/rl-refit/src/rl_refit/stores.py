"""torch's key-value stores, under names that a type checker can follow: `torch.distributed` does not declare them."""

from __future__ import annotations

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["FileStore", "PrefixStore", "Store", "TCPStore"]
