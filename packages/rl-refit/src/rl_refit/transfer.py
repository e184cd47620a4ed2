"""Bring every routed tensor from a source to a sink in the same process, through the ring of slots.

Knows no versions and no commit. A slot is filled with copies of the source's tensors, then staged piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from rl_refit.buckets import Bucket
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Digest, digest_tensor
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import TensorMeta
from rl_refit.plan import RefitPlan
from rl_refit.progress import Progress
from rl_refit.ring import SlotRing

__all__ = ["InProcessTransfer"]


@dataclass(frozen=True, slots=True)
class _Move:
    """A piece of a tensor and its place in a slot."""

    bucket: int
    region: Region
    slot: Tensor


@dataclass(slots=True)
class _Step:
    """A tensor and the moves that bring all of it."""

    meta: TensorMeta
    whole: Region
    moves: list[_Move] = field(default_factory=list)


@final
class InProcessTransfer:
    """The schedule of a plan between one rank and one rank: made once, run at every refit.

    Args:
        plan: From one rank to one rank.
        bucket_bytes: Bytes of a slot.
        slots: Slots of the ring.

    Raises:
        RefitError: The plan is between other numbers of ranks.
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """

    def __init__(self, plan: RefitPlan, *, bucket_bytes: int, slots: int) -> None:
        _require_one_rank(plan)
        self._buckets = plan.buckets(bucket_bytes)
        self._plan = plan
        self._ring_shape = (slots, bucket_bytes)
        self._steps: tuple[_Step, ...] = ()
        self._names = tuple(meta.name for meta in plan.sink.tensors if meta.tied_to is None)

    @property
    def num_buckets(self) -> int:
        """Buckets of one run."""
        return len(self._buckets)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring."""
        slots, bucket_bytes = self._ring_shape
        return slots * bucket_bytes

    def run(self, source: WeightSource, sink: WeightSink, progress: Progress, *, verify: bool) -> Digest:
        """Stage every tensor; return the digests of what the source gave, or none without `verify`.

        The first run allocates the ring, on the device of the first tensor.

        Raises:
            RefitError: The source yields other tensors than its manifest promises.
            DeadlineError: The transfer takes too long; looked at after each bucket.
        """
        digests: dict[str, str] = {}
        filled: list[_Move] = []
        shards = source.shards(self._names)
        for position, name in enumerate(self._names):
            progress.tensor = name
            tensor = self._next_tensor(shards, position)
            if verify:
                digests[name] = digest_tensor(tensor)
            step = self._steps[position]
            for move in step.moves:
                if filled and filled[-1].bucket != move.bucket:
                    _stage(filled, sink, progress)
                    progress.tensor = name
                piece = tensor if move.region == step.whole else tensor[move.region.index_within(step.whole)]
                move.slot.copy_(piece)
                filled.append(move)
        _stage(filled, sink, progress)
        extra = next(shards, None)
        if extra is not None:
            raise RefitError(f"the source yields {extra[0]} after the last tensor that it was asked for")
        return Digest(digests)

    def _next_tensor(self, shards: Iterator[tuple[Region, Tensor]], position: int) -> Tensor:
        name = self._names[position]
        region, tensor = next(shards, (None, None))
        if region is None or tensor is None:
            raise RefitError(f"the source stops before {name!r}, which its manifest has", tensor=name)
        if not self._steps:
            self._steps = self._schedule(tensor.device)
        step = self._steps[position]
        if region != step.whole or tensor.shape != step.whole.shape or tensor.dtype != step.meta.torch_dtype:
            raise RefitError(
                f"the source yields {region} as {list(tensor.shape)} in {tensor.dtype}, where its manifest has "
                f"{step.whole} in {step.meta.dtype}",
                tensor=name,
            )
        return tensor

    def _schedule(self, device: torch.device) -> tuple[_Step, ...]:
        slots, bucket_bytes = self._ring_shape
        ring = SlotRing(slots=slots, bucket_bytes=bucket_bytes, device=device)
        metas = [self._plan.source.by_name[name] for name in self._names]
        steps = {meta.name: _Step(meta, Region(meta.name, (0,) * len(meta.shape), meta.shape)) for meta in metas}
        for index, bucket in enumerate(self._buckets):
            _add_moves(steps, ring, (index, bucket))
        return tuple(steps.values())


def _add_moves(steps: dict[str, _Step], ring: SlotRing, numbered: tuple[int, Bucket]) -> None:
    index, bucket = numbered
    for piece in bucket:
        step = steps[piece.region.name]
        step.moves.append(_Move(index, piece.region, ring.view(index, piece, step.meta.torch_dtype)))


def _stage(filled: list[_Move], sink: WeightSink, progress: Progress) -> None:
    """Hand a full slot to the sink, and empty the list."""
    for move in filled:
        progress.bucket, progress.tensor = move.bucket, move.region.name
        sink.stage(move.region, move.slot)
    filled.clear()
    progress.check_deadline()


def _require_one_rank(plan: RefitPlan) -> None:
    source, sink = plan.source.ranks, plan.sink.ranks
    if len(source) > 1 or len(sink) > 1:
        raise RefitError(
            f"the in-process transport moves weights between one rank and one engine; "
            f"the source spans ranks {list(source)} and the sink ranks {list(sink)}",
            phase="prepare",
        )
