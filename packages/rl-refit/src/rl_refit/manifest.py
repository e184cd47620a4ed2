"""What one side of a refit holds: an ordered list of tensors by Hugging Face name, with a hash both sides can compare.

Knows no tensor data: it is metadata, and small.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from rl_refit.layout import Layout, Region

__all__ = ["Manifest", "TensorMeta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """One tensor of a manifest."""

    name: str
    """The Hugging Face name, `model.embed_tokens.weight`."""

    shape: tuple[int, ...]
    """Global shape, over all ranks."""

    dtype: str
    """As torch writes it, without the prefix: `bfloat16`."""

    layout: Layout
    """Which box of it each rank holds."""

    tied_to: str | None = None
    """The tensor whose memory this one shares; that one is sent, this one follows."""

    def __post_init__(self) -> None:
        if type(getattr(torch, self.dtype, None)) is not torch.dtype:
            raise ValueError(f"{self.dtype!r} is no torch dtype; {self.name!r} needs one, such as 'bfloat16'")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's own object."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def total_bytes(self) -> int:
        """Bytes of the global tensor, counted once."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def regions(self) -> dict[int, Region]:
        """The box that each rank holds; boxes may be empty."""
        return self.layout.regions(self.name, self.shape)


@dataclass(frozen=True)
class Manifest:
    """The tensors of one side, in the order in which they are sent."""

    tensors: tuple[TensorMeta, ...]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(meta.name for meta in self.tensors).items() if count > 1]
        if twice:
            raise ValueError(f"a manifest names each tensor once; named more often: {', '.join(twice)}")
        roots = {meta.name for meta in self.tensors if meta.tied_to is None}
        loose = [f"{m.name} -> {m.tied_to}" for m in self.tensors if m.tied_to is not None and m.tied_to not in roots]
        if loose:
            raise ValueError(f"a tie leads to a tensor of the manifest that is not tied itself; got {', '.join(loose)}")

    @cached_property
    def by_name(self) -> dict[str, TensorMeta]:
        """Every tensor by its name."""
        return {meta.name: meta for meta in self.tensors}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, ties counted once, replicas not counted."""
        return sum(meta.total_bytes for meta in self.tensors if meta.tied_to is None)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds anything, ascending."""
        return tuple(sorted({rank for layout in {meta.layout for meta in self.tensors} for rank in layout.ranks}))

    def hash(self) -> str:
        """sha256 over the manifest as canonical JSON, in hex: equal on every machine for equal manifests."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        rows = [(meta.name, meta.shape, meta.dtype, meta.tied_to, *_plain(meta.layout)) for meta in self.tensors]
        return hashlib.sha256(json.dumps(["rl-refit manifest 1", rows], separators=(",", ":")).encode()).hexdigest()


def _plain(layout: Layout) -> tuple[tuple[int | None, ...], ...]:
    return layout.mesh_shape, layout.sharded_dims, layout.ranks
