"""Which boxes of a refit are digested: all of them, or every k-th of their chunks, another k-th at the next version.

Knows no tensors: a pure function that both sides compute. A chunk is at most a MiB, and chunks are counted through all
boxes; the first of them moves on with the phase, so that k refits in a row see every byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import final

from rl_refit.buckets import split
from rl_refit.layout import Region

__all__ = ["CHUNK_BYTES", "Boxes", "Sample"]

CHUNK_BYTES = 2**20


@final
class Boxes:
    """The boxes that travel one way, none of them empty, and their chunks, cut once.

    Args:
        boxes: Each with the bytes of one of its elements.
    """

    def __init__(self, boxes: Iterable[tuple[Region, int]] = ()) -> None:
        self._boxes = [(box, itemsize) for box, itemsize in boxes if box.numel]

    @cached_property
    def whole(self) -> tuple[Region, ...]:
        """The boxes as they are."""
        return tuple(box for box, _ in self._boxes)

    @cached_property
    def chunks(self) -> tuple[Region, ...]:
        """The boxes cut into chunks, in order."""
        return tuple(
            chunk for box, itemsize in self._boxes for chunk in split(box, max_elements=CHUNK_BYTES // itemsize)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Every `stride`-th chunk, beginning with number `phase` modulo `stride`; 1 is every byte, 0 is nothing."""

    stride: int = 1
    phase: int = 0

    def __post_init__(self) -> None:
        if self.stride < 0 or self.phase < 0:
            raise ValueError(f"a sample needs a stride and a phase ≥ 0; got stride={self.stride}, phase={self.phase}")

    def of(self, boxes: Boxes) -> tuple[Region, ...]:
        """The chunks of `boxes` to digest; the boxes themselves where that is every byte."""
        if self.stride == 0:
            return ()
        return boxes.whole if self.stride == 1 else boxes.chunks[self.phase % self.stride :: self.stride]

    @property
    def text(self) -> str:
        """For reports: "every byte", "1/8 of the chunks", "nothing"."""
        return {0: "nothing", 1: "every byte"}.get(self.stride, f"1/{self.stride} of the chunks")
