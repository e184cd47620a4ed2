"""torch's key-value stores, under names that a type checker can follow: `torch.distributed` does not declare them."""

from __future__ import annotations

from typing import Any

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["FileStore", "PrefixStore", "Store", "TCPStore", "clone"]


def clone(store: Store) -> Store:
    """`store` with a connection of its own, for another thread."""
    untyped: Any = store  # torch's stubs leave the method out
    copy: Store = untyped.clone()
    return copy
