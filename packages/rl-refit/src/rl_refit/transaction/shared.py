"""A source that several refits send at the same time, one for each replica of an engine.

What they would all do alike is done once: a tensor is read by one thread at a time, and what is sent to several
replicas is digested for the first of them, and planned for the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor

from rl_refit.contracts import WeightSource
from rl_refit.digest import Digest, digest_views
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan, Topology, plan_refit
from rl_refit.transports.base import PATIENCE_S, Watch

__all__ = ["SharedSource", "digest_source"]


@final
class SharedSource:
    """A `WeightSource` in several refits at once, each in a thread of its own.

    Args:
        source: Iterated by several threads, though never advanced by two at the same time.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._reading, self._digesting, self._planning = threading.Lock(), threading.Lock(), threading.Lock()
        self._plans: dict[tuple[str, str, Topology], RefitPlan] = {}
        self.tensors_stay = bool(getattr(source, "tensors_stay", False))
        """As of the source."""
        self.digests: dict[tuple[Region, ...], Digest] = {}
        """What was digested of the present weights; to be emptied when they have changed."""

    @property
    def device(self) -> torch.device:
        """As of the source."""
        return self._source.device

    def manifest(self) -> Manifest:
        """As of the source."""
        with self._reading:
            return self._source.manifest()

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """As of the source."""
        with self._reading:
            shards = iter(self._source.shards(names))
        while True:
            with self._reading:
                shard = next(shards, None)
            if shard is None:
                return
            yield shard

    def digest(self, regions: tuple[Region, ...], watch: Watch) -> Digest:
        """Of what this rank sends of the present weights, computed once for all."""
        while not self._digesting.acquire(timeout=PATIENCE_S):
            watch.check()
        try:
            if regions not in self.digests:
                self.digests[regions] = _digest(self, regions, watch)
            return self.digests[regions]
        finally:
            self._digesting.release()

    def changed(self, watch: Watch) -> tuple[str, ...]:
        """Tensors of which `digests` says something else than the source now has."""
        found: dict[str, None] = {}
        for regions, digest in self.digests.items():
            found |= dict.fromkeys(digest.differing(_digest(self, regions, watch)))
        return tuple(found)

    def plan(self, source: Manifest, sink: Manifest, topology: Topology) -> RefitPlan:
        """The plan of these manifests, made once for replicas that are alike; the two latest plans are kept."""
        key = source.hash(), sink.hash(), topology
        with self._planning:
            plan = self._plans.pop(key, None) or plan_refit(source, sink, topology)
            self._plans[key] = plan
            if len(self._plans) > 2:
                del self._plans[next(iter(self._plans))]
        return plan


def digest_source(source: WeightSource, regions: tuple[Region, ...], watch: Watch) -> Digest:
    """Of the boxes `regions`, each of which this rank of the source holds; of a shared source computed once."""
    return source.digest(regions, watch) if isinstance(source, SharedSource) else _digest(source, regions, watch)


def _digest(source: WeightSource, regions: tuple[Region, ...], watch: Watch) -> Digest:
    by_name: dict[str, list[Region]] = {}
    for region in regions:
        by_name.setdefault(region.name, []).append(region)

    def views() -> Iterator[tuple[Region, Tensor]]:
        for box, tensor in source.shards(by_name):
            watch.check()
            for region in by_name[box.name]:
                if box.intersect(region) == region:
                    yield region, tensor if box == region else tensor[region.index_within(box)]

    return digest_views(regions, views())
