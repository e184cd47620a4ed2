"""Schedules played out by the real outbox and inbox: what every sink rank stages, and who ever waits for whom."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_refit.buckets import ALIGNMENT, size_of
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import Topology, plan_refit
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Inbox, Outbox, Watch

seeds = st.integers(0, 2**32 - 1)
MAX_RANKS = 8


def some_mesh(rng, shape):
    sizes = rng.choice([(), (1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2)])
    dims = tuple(rng.choice((None, *range(len(shape)))) for _ in sizes)
    strided = (0,) if len(sizes) > 1 and dims[0] is not None else ()
    ranks = tuple(rng.sample(range(MAX_RANKS), math.prod(sizes)))
    return Layout(mesh_shape=sizes, sharded_dims=dims, strided_axes=strided, ranks=ranks)


def some_stripes(rng, shape):
    """Boxes: rows dealt out to two ranks, out of order."""
    if not shape:
        return Layout.whole(rng.randint(0, 3))
    rows = [Region("", (row, *(0,) * (len(shape) - 1)), (1, *shape[1:])) for row in range(shape[0])]
    rng.shuffle(rows)
    return Layout.from_boxes({3: rows[::2], 1: rows[1::2]})


def some_windows(rng, shape):
    """For a sink: rows of three ranks that overlap in part."""
    if not shape:
        return some_mesh(rng, shape)
    spans = [sorted(rng.choices(range(shape[0] + 1), k=2)) for _ in range(3)]
    rest = tuple(0 for _ in shape[1:]), shape[1:]
    return Layout.from_boxes(
        {rank: [Region("", (a, *rest[0]), (b - a, *rest[1]))] for rank, (a, b) in enumerate(spans)}
    )


def some_plan(rng, nodes="ab"):
    sides = [], []
    for number in range(rng.randint(1, 4)):
        shape = tuple(rng.choice((0, 1, 2, 5, 8, 40)) for _ in range(rng.randint(0, 2)))
        dtype = rng.choice(["int8", "bfloat16", "float64"])
        for side, more in zip(sides, (some_mesh, some_windows), strict=True):
            layout = rng.choice([some_mesh, some_stripes, more])(rng, shape)
            side.append(TensorMeta(name=f"w{number}", shape=shape, dtype=dtype, layout=layout))
    source_nodes, sink_nodes = (tuple(rng.choices(nodes, k=MAX_RANKS)) for _ in range(2))
    topology = rng.choice([None, Topology(source_nodes=source_nodes, sink_nodes=sink_nodes)])
    return plan_refit(*(Manifest(tuple(side)) for side in sides), topology)


def values(meta):
    numbers = torch.arange(math.prod(meta.shape)).view(meta.shape)
    return (numbers % 251 - 125).to(meta.torch_dtype)


def part_of(meta, box):
    return values(meta)[box.index_within(Region("", (0,) * len(meta.shape), meta.shape))]


class Source:
    """One rank of a source, which yields the boxes of its manifest as tensors that are gone when the next one comes."""

    def __init__(self, manifest, rank):
        self.of, self.rank = manifest, rank

    def manifest(self):
        return self.of

    def shards(self, names):
        for name in names:
            for box in self.of.by_name[name].regions_on(self.rank):
                tensor = part_of(self.of.by_name[name], box).clone()
                yield box, tensor
                tensor.zero_()


class Sink:
    """One rank of a sink that remembers what was staged, and how often each element was."""

    def __init__(self, manifest, rank):
        self.boxes = [box for meta in manifest.tensors for box in meta.regions_on(rank)]
        self.staged = {box: part_of(manifest.by_name[box.name], box) * 0 for box in self.boxes}
        self.times = {box: torch.zeros(box.shape, dtype=torch.int64) for box in self.boxes}

    def stage(self, region, tensor, *, stays=False):
        (box,) = (box for box in self.boxes if box.name == region.name and box.intersect(region) == region)
        self.staged[box][region.index_within(box)] = tensor
        self.times[box][region.index_within(box)] += 1


def play(schedule):
    plan, watch = schedule.plan, Watch(deadline_s=60.0)
    outboxes = {rank: Outbox(Source(plan.source, rank), schedule, watch, refit=1) for rank in plan.source.ranks}
    sinks = {rank: Sink(plan.sink, rank) for rank in plan.sink.ranks}
    inboxes = {rank: Inbox(sink, schedule, watch, refit=1) for rank, sink in sinks.items()}
    for stream in schedule.streams:
        slots = [torch.zeros(size_of(bucket), dtype=torch.uint8) for bucket in stream.buckets]
        for number, piece, tensor in outboxes[stream.source_rank].pieces(stream):
            flat = tensor.contiguous().flatten().view(torch.uint8)
            slots[number][piece.start : piece.start + piece.nbytes] = flat
        for bucket, slot in zip(stream.buckets, slots, strict=True):
            for rank in stream.sink_ranks:
                inboxes[rank].deliver(bucket, slot)
    return sinks


@settings(max_examples=300)
@given(seeds, st.sampled_from([None, 512, 1024]))
def test_every_sink_rank_stages_each_of_its_elements_exactly_once(seed, bucket_bytes):
    schedule = make_schedule(some_plan(random.Random(seed)), bucket_bytes=bucket_bytes)
    for sink in play(schedule).values():
        for box in sink.boxes:
            assert torch.equal(sink.staged[box], part_of(schedule.plan.sink.by_name[box.name], box)), box
            assert (sink.times[box] == 1).all(), box


@settings(max_examples=300)
@given(seeds, st.sampled_from([512, 2048]))
def test_buckets_keep_their_size_and_pieces_their_alignment(seed, bucket_bytes):
    schedule = make_schedule(some_plan(random.Random(seed)), bucket_bytes=bucket_bytes)
    assert schedule.num_buckets == sum(len(stream.buckets) for stream in schedule.streams)
    for stream in schedule.streams:
        assert stream.buckets
        for bucket in stream.buckets:
            assert 0 < size_of(bucket) <= bucket_bytes
            assert all(piece.start % ALIGNMENT == 0 for piece in bucket)


@settings(max_examples=300)
@given(seeds)
def test_parties_that_block_never_wait_in_a_circle(seed):
    """A stream runs when every party of it has come to it; a process has a rank of the source, of the sink, or both,
    and works through its streams one after the other."""
    rng = random.Random(seed)
    schedule = make_schedule(some_plan(rng), bucket_bytes=512)
    of_source, of_sink = (rng.sample(range(MAX_RANKS), MAX_RANKS) for _ in range(2))  # rank -> process

    def parties(stream):
        return {of_source[stream.source_rank], *(of_sink[rank] for rank in stream.sink_ranks)}

    agenda = {}
    for process in range(MAX_RANKS):
        of_both = schedule.of(source_rank=of_source.index(process), sink_rank=of_sink.index(process))
        agenda[process] = sorted({stream.number: stream for stream in of_both}.values(), key=lambda one: one.number)
    done = 0
    while any(agenda.values()):
        heads = [mine[0] for mine in agenda.values() if mine]
        ready = [stream for stream in heads if all(agenda[party][0] is stream for party in parties(stream))]
        assert ready, "everybody waits"
        for party in parties(ready[0]):
            agenda[party].pop(0)
        done += 1
    assert done == len(schedule.streams)


@pytest.mark.parametrize(("sources", "sinks"), [(4, 4), (2, 4), (4, 2), (3, 5)])
def test_in_each_turn_no_rank_takes_part_twice(sources, sinks):
    """Everybody sends to everybody: rows to columns. Source i begins with sink i, and goes on with i + 1, …"""
    shape = (60, 60)
    meta = {"name": "w", "shape": shape, "dtype": "int8"}
    source = TensorMeta(**meta, layout=Layout.from_placements((sources,), (0,)))
    sink = TensorMeta(**meta, layout=Layout.from_placements((sinks,), (1,)))
    schedule = make_schedule(plan_refit(Manifest((source,)), Manifest((sink,))), bucket_bytes=512)
    ways = [(stream.source_rank, *stream.sink_ranks) for stream in schedule.streams]
    assert len(ways) == sources * sinks
    assert [stream.number for stream in schedule.streams] == list(range(len(ways)))
    turns = {}
    for one, other in ways:
        turns.setdefault((other - one) % max(sources, sinks), []).append((one, other))
    assert [way for turn in turns.values() for way in turn] == ways
    for turn in turns.values():
        assert len({one for one, _ in turn}) == len({other for _, other in turn}) == len(turn)
    assert all(stream in schedule.of(source_rank=stream.source_rank) for stream in schedule.streams)
    assert all(stream in schedule.of(sink_rank=stream.sink_ranks[0]) for stream in schedule.streams)


def test_a_bucket_that_is_not_aligned_is_refused():
    with pytest.raises(ValueError, match="positive multiple of 512 bytes; got bucket_bytes=100"):
        make_schedule(some_plan(random.Random(1)), bucket_bytes=100)
