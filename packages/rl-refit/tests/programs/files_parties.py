"""Parties of a refit through files, one thread each: plain tensors on both sides, a transaction in miniature."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

from rl_refit import Coverage, Layout, Manifest, Region, TensorMeta, digest_regions, plan_refit
from rl_refit.errors import AbortedError, RefitError
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch

TENSORS = {
    "wide": (torch.bfloat16, (6, 5)),
    "tall": (torch.float32, (9, 2)),
    "scalar": (torch.float64, ()),
    "nothing": (torch.int8, (0, 3)),
    "bytes": (torch.uint8, (7,)),
    "mask": (torch.bool, (3, 3)),
}


def random(dtype, shape, seed):
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def new_weights(seed, tensors=TENSORS):
    return {name: random(dtype, shape, seed * 100 + i) for i, (name, (dtype, shape)) in enumerate(tensors.items())}


def trained(weights, step):
    """One element of each tensor is another."""
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in changed.values():
        if tensor.numel():
            flat = tensor.view(-1).view(torch.uint8)
            flat[step * tensor.element_size() % flat.numel()] ^= 1
    return changed


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def manifest_of(num_ranks, dim, tensors=TENSORS):
    """Every tensor of two dims cut along `dim` over the ranks; the others, or all for None, whole on each."""
    metas = []
    for name, (dtype, shape) in tensors.items():
        cut = dim if len(shape) == 2 else None
        layout = Layout.from_placements((num_ranks,), [cut])
        metas.append(TensorMeta(name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), layout=layout))
    return Manifest(tuple(metas))


def local(tensor, region):
    return tensor[region.index_within(Region(region.name, (0,) * tensor.dim(), tuple(tensor.shape)))]


class StateSource:
    """Rank `rank` of a source that has `weights`, by name, over all ranks."""

    def __init__(self, manifest, rank, weights):
        self._manifest, self._rank, self.weights = manifest, rank, weights

    def manifest(self):
        return self._manifest

    def shards(self, names):
        for name in names:
            for region in self._manifest.by_name[name].regions().get(self._rank, ()):
                yield region, local(self.weights[name], region)


class StateSink:
    """Rank `rank` of a sink: keeps what stays, copies what does not, and serves `boxes`."""

    def __init__(self, manifest, rank):
        self._manifest, self._rank, self.version = manifest, rank, None
        self.boxes = {}
        self._staged = {}
        for meta in manifest.tensors:
            for region in meta.regions().get(rank, ()):
                self.boxes[region] = torch.zeros(region.shape, dtype=meta.torch_dtype)

    def prepare(self, manifest):
        self._staged = {}
        return Coverage(manifest_hash=manifest.hash(), sink=self._manifest, version=self.version)

    def stage(self, region, tensor, *, stays=False):
        assert region not in self._staged, f"{region} came twice"
        self._staged[region] = tensor if stays else tensor.clone()

    def digest(self, regions=None):
        return digest_regions(regions or self._staged, self._read)

    def _read(self, region):
        for box, tensor in (self._staged or self.boxes).items():
            if box.name == region.name and box.intersect(region) == region:
                return tensor[region.index_within(box)]
        raise AssertionError(f"{region} is not here")

    def commit(self, version):
        for region, box in self.boxes.items():
            named = [(part, tensor) for part, tensor in self._staged.items() if part.name == region.name]
            parts = [(part, tensor) for part, tensor in named if part.intersect(region)]
            assert sum(part.intersect(region).numel for part, _ in parts) == region.numel, f"{region} is not complete"
            for part, tensor in parts:
                shared = part.intersect(region)
                box[shared.index_within(region)] = tensor[shared.index_within(part)]
        self.version, self._staged = version, {}

    def abort(self):
        self._staged = {}

    def has(self, weights):
        return all(
            torch.equal(bits(box), bits(local(weights[region.name], region))) for region, box in self.boxes.items()
        )


class Party:
    """One process's worth of a refit."""

    def __init__(self, schedule, transport, store, *, source=None, sink=None):
        self.schedule, self.transport, self.source, self.sink = schedule, transport, source, sink
        self.channel = Channel(
            schedule=schedule,
            source_rank=None if source is None else source._rank,
            sink_rank=None if sink is None else sink._rank,
            slots=2,
            device=torch.device("cpu"),
            store=store,
        )

    def transfer(self, version, refit, watch):
        outbox = inbox = None
        if self.source is not None:
            outbox = Outbox(self.source, self.schedule, watch, version=version, refit=refit)
        if self.sink is not None:
            inbox = Inbox(self.sink, self.schedule, self.sink._rank, watch, version=version, refit=refit)
        self.transport.transfer(outbox, inbox, watch)


class Parties:
    """Sources and sinks that share `weights`, each with a transport of its own, and what they did so far."""

    def __init__(self, make_transport, source, sink, weights, *, deadline_s=60.0):
        plan = plan_refit(source, sink)
        store, self.deadline_s, self.refits = HashStore(), deadline_s, 0
        self.schedule = make_schedule(plan, routing="multicast", bucket_bytes=None)
        self.sources = [
            Party(self.schedule, make_transport(), store, source=StateSource(source, rank, weights))
            for rank in source.ranks
        ]
        self.sinks = [Party(self.schedule, make_transport(), store, sink=StateSink(sink, rank)) for rank in sink.ranks]
        for party in self.all:
            party.transport.open(party.channel, Watch(deadline_s=deadline_s))

    @property
    def all(self):
        return [*self.sources, *self.sinks]

    def give(self, weights):
        for party in self.sources:
            party.source.weights = weights

    def refit(self, version, *, fail_after_transfer=False):
        """Transfer at all parties at once, then commit, or abort where any failed; the errors, by party."""
        self.refits += 1
        failed = threading.Event()
        for party in self.sinks:
            party.sink.prepare(self.schedule.plan.source)
        with ThreadPoolExecutor(len(self.all)) as threads:
            errors = list(threads.map(lambda party: self._transfer(party, version, failed), self.all))
        aborted = fail_after_transfer or any(errors)
        for party in self.sinks:
            if aborted:
                party.sink.abort()
            else:
                party.sink.commit(version)
        for party in self.all:
            party.transport.finish()
        return errors

    def commit(self, version, weights):
        """A refit that must succeed."""
        self.give(weights)
        for error in self.refit(version):
            if error is not None:
                raise error
        assert all(party.sink.has(weights) for party in self.sinks)

    def _transfer(self, party, version, failed):
        def look_around():
            if failed.is_set():
                raise AbortedError("another party gave up")

        try:
            party.transfer(version, self.refits, Watch(deadline_s=self.deadline_s, look_around=look_around))
        except (RefitError, OSError) as error:
            failed.set()
            return error
        return None
