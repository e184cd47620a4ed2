"""Plans played out on tensors of indices: what arrives must be the sink's box, each element once."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_refit import Layout, Manifest, Region, TensorMeta, plan_refit


@st.composite
def layouts(draw, num_dims):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=2)))
    sharded_dims = [draw(st.one_of(st.none(), st.integers(0, num_dims - 1))) for _ in mesh_shape]
    return Layout.from_placements(mesh_shape, sharded_dims)


@st.composite
def manifest_pairs(draw, max_tensors=3):
    source, sink = [], []
    for number in range(draw(st.integers(1, max_tensors))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        dtype = draw(st.sampled_from(["int8", "bfloat16", "float32"]))
        for side in (source, sink):
            layout = draw(layouts(len(shape)))
            side.append(TensorMeta(name=f"w{number}", shape=shape, dtype=dtype, layout=layout))
    return Manifest(tuple(source)), Manifest(tuple(sink))


def pair(shape, source, sink):
    meta = TensorMeta(name="w", shape=shape, dtype="bfloat16", layout=source)
    return Manifest((meta,)), Manifest((dataclasses.replace(meta, layout=sink),))


@given(manifest_pairs())
def test_every_sink_rank_receives_each_element_of_its_box_exactly_once(manifests):
    plan = plan_refit(*manifests)
    for meta in plan.sink.tensors:
        values = torch.arange(1, math.prod(meta.shape) + 1).view(meta.shape)
        whole = Region(meta.name, (0,) * len(meta.shape), meta.shape)
        for rank, box in meta.regions().items():
            arrived = torch.zeros(box.shape, dtype=torch.int64)
            for route in plan.routes:
                if route.region.name == meta.name and route.sink_rank == rank:
                    arrived[route.region.index_within(box)] += values[route.region.index_within(whole)]
            assert torch.equal(arrived, values[box.index_within(whole)])


@given(manifest_pairs())
def test_a_route_starts_at_a_rank_that_holds_it(manifests):
    plan = plan_refit(*manifests)
    for route in plan.routes:
        held = plan.source.by_name[route.region.name].regions()[route.source_rank]
        assert held.intersect(route.region) == route.region


@given(manifest_pairs())
def test_bytes_received_are_the_lower_bound(manifests):
    plan = plan_refit(*manifests)
    for rank in plan.sink.ranks:
        held = sum(
            meta.regions()[rank].numel * meta.torch_dtype.itemsize
            for meta in plan.sink.tensors
            if rank in meta.layout.ranks
        )
        assert plan.bytes_received(rank) == plan.lower_bound(rank) == held
    assert sum(map(plan.bytes_sent, plan.source.ranks)) == sum(map(plan.bytes_received, plan.sink.ranks))


def test_a_rank_outside_of_the_sink_receives_nothing():
    plan = plan_refit(*pair((4,), Layout.whole(), Layout.whole()))
    assert plan.bytes_received(7) == plan.lower_bound(7) == plan.bytes_sent(7) == 0


PLAN_ELSEWHERE = """
from rl_refit import Layout, Manifest, TensorMeta, plan_refit

def side(*dims):
    layout = Layout.from_placements((2, 3), dims)
    return Manifest(tuple(TensorMeta(name=f"w{i}", shape=(7, 5 + i), dtype="int8", layout=layout) for i in range(9)))

print(plan_refit(side(None, 0), side(1, None)).routes)
"""


def test_every_process_makes_the_same_plan():
    """Whatever the seed of Python's string hashes, which orders sets of names."""
    plans = {
        subprocess.run(
            [sys.executable, "-c", PLAN_ELSEWHERE],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(plans) == 1
    assert plans.pop().count("Route(") > 9


def relisted(layout, seed):
    """The same mesh with the ranks of its replicas listed in another order: every rank keeps its box."""
    boxes = {}
    size = 64  # enough elements for distinct boxes to differ
    for rank, region in layout.regions("w", (size,) * 3).items():
        boxes.setdefault(region, []).append(rank)
    shuffled = {}
    for ranks in boxes.values():
        order = ranks[:]
        random.Random(seed).shuffle(order)
        shuffled.update(zip(ranks, order, strict=True))
    return dataclasses.replace(layout, ranks=tuple(shuffled[rank] for rank in layout.ranks))


@given(manifest_pairs(), st.integers(0, 99))
def test_the_order_in_which_ranks_are_listed_changes_nothing(manifests, seed):
    source, sink = (
        Manifest(tuple(dataclasses.replace(meta, layout=relisted(meta.layout, seed)) for meta in side.tensors))
        for side in manifests
    )
    assert plan_refit(source, sink).routes == plan_refit(*manifests).routes


@given(manifest_pairs(), st.integers(0, 99))
def test_renumbered_sink_ranks_receive_the_same_bytes(manifests, seed):
    source, sink = manifests
    numbers = dict(zip(sink.ranks, random.Random(seed).sample(range(100), len(sink.ranks)), strict=True))
    renumbered = Manifest(
        tuple(
            dataclasses.replace(
                meta, layout=dataclasses.replace(meta.layout, ranks=tuple(numbers[rank] for rank in meta.layout.ranks))
            )
            for meta in sink.tensors
        )
    )
    before, after = plan_refit(source, sink), plan_refit(source, renumbered)
    assert all(before.bytes_received(rank) == after.bytes_received(numbers[rank]) for rank in sink.ranks)


@given(manifest_pairs(max_tensors=1))
def test_replicas_of_a_box_share_its_sending(manifests):
    """Between two replicas lies at most the largest box that they send: what a greedy choice promises."""
    plan = plan_refit(*manifests)
    replicas = {}
    for rank, region in plan.source.tensors[0].regions().items():
        replicas.setdefault(region, []).append(rank)
    for ranks in replicas.values():
        largest = max((route.nbytes for route in plan.routes if route.source_rank in ranks), default=0)
        sent = [plan.bytes_sent(rank) for rank in ranks]
        assert max(sent) - min(sent) <= largest


def test_many_replicated_tensors_are_sent_by_all_replicas_alike():
    metas = [TensorMeta(name=f"w{i}", shape=(8,), dtype="float32", layout=Layout.whole()) for i in range(12)]
    source = Manifest(tuple(dataclasses.replace(meta, layout=Layout.from_placements((4,), (None,))) for meta in metas))
    plan = plan_refit(source, Manifest(tuple(metas)))
    assert Counter(route.source_rank for route in plan.routes) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_fsdp_to_tensor_parallel_by_hand():
    """[4, 4] in bfloat16, rows over 2 trainers, columns over 2 engines: four boxes of [2, 2], 8 bytes each."""
    plan = plan_refit(
        *pair((4, 4), Layout.from_placements((2,), (0,)), Layout.from_placements((2,), (1,), ranks=(8, 9)))
    )
    assert [(r.region.offsets, r.region.shape, r.source_rank, r.sink_rank, r.nbytes) for r in plan.routes] == [
        ((0, 0), (2, 2), 0, 8, 8),
        ((2, 0), (2, 2), 1, 8, 8),
        ((0, 2), (2, 2), 0, 9, 8),
        ((2, 2), (2, 2), 1, 9, 8),
    ]


def test_explain_shows_each_rank_beside_its_bound():
    text = plan_refit(
        *pair((5, 4), Layout.from_placements((2,), (0,)), Layout.from_placements((2,), (None,)))
    ).explain()
    assert text.splitlines() == [
        "1 tensors fed, 0 tied to one of them, 0 unmatched",
        "80 bytes in 4 routes, 4 buckets of at most 4,194,304 bytes",
        "sink rank 0 receives 40 bytes, lower bound 40",
        "sink rank 1 receives 40 bytes, lower bound 40",
        "source rank 0 sends 48 bytes",
        "source rank 1 sends 32 bytes",
    ]
