"""Megatron's layouts, as each rank would tell of its own memory, merged and planned to an engine's tensor parallelism.

Eight trainers: pipeline 2 × tensor 2 × data 2, where the data ranks share the experts out (expert parallelism 2). Eight
engine ranks: two replicas of tensor parallelism 4, with two key and value heads, so that each lies on two ranks.

    attention     Megatron keeps one tensor of groups [q … q k v] and cuts between groups: a box of q_proj, k_proj and
                  v_proj for each group of a rank
    first linear  [gate; up] of a rank's rows: a box of gate_proj and one of up_proj
    vocabulary    padded to a multiple that every rank shares: boxes end with the real rows
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rl_refit.errors import CoverageError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta, merge_manifests
from rl_refit.plan import plan_refit

HIDDEN, INNER, HEAD, GROUPS, HEADS_PER_GROUP = 16, 24, 4, 2, 2
VOCABULARY, PADDED = 50, 64
LAYERS, EXPERTS = 4, 4
PIPELINE, TENSOR, DATA = 2, 2, 2

SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "head": (VOCABULARY, HIDDEN),
    "norm": (HIDDEN,),
    "q": (GROUPS * HEADS_PER_GROUP * HEAD, HIDDEN),
    "k": (GROUPS * HEAD, HIDDEN),
    "v": (GROUPS * HEAD, HIDDEN),
    "o": (HIDDEN, GROUPS * HEADS_PER_GROUP * HEAD),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
LINEARS = ("gate", "up", "down")


def rows(kind, start, stop):
    """Rows of a tensor, as many of them as there are."""
    size, *rest = SHAPES[kind]
    start, stop = min(start, size), min(stop, size)
    return Region(kind, (start, *(0 for _ in rest)), (stop - start, *rest))


def columns(kind, start, stop):
    return Region(kind, (0, start), (SHAPES[kind][0], stop - start))


def piece(kind, rank, size):
    """What column-parallel, row-parallel and vocabulary-parallel give rank `rank` of `size`."""
    if kind in ("embed", "head"):
        return rows(kind, rank * PADDED // size, (rank + 1) * PADDED // size)
    total = SHAPES[kind][1] if kind in ("o", "down") else SHAPES[kind][0]
    return (columns if kind in ("o", "down") else rows)(kind, rank * total // size, (rank + 1) * total // size)


def attention_of_groups(groups):
    """A box of q, k and v for each group, as they follow one another in Megatron's fused tensor."""
    sizes = {"q": HEADS_PER_GROUP * HEAD, "k": HEAD, "v": HEAD}
    return {kind: [rows(kind, group * size, (group + 1) * size) for group in groups] for kind, size in sizes.items()}


def names():
    """Every tensor of the model with its kind, its layer and its expert."""
    yield "embed", "embed", None, None
    for layer in range(LAYERS):
        for kind in ("q", "k", "v", "o", "norm"):
            yield f"layers.{layer}.{kind}", kind, layer, None
        for expert in range(EXPERTS):
            for kind in LINEARS:
                yield f"layers.{layer}.experts.{expert}.{kind}", kind, layer, expert
    yield "norm", "norm", None, None
    yield "head", "head", None, None


def manifest(boxes_of, rank):
    """The tensors of which `boxes_of` gives this rank a list of boxes."""
    metas = []
    for name, kind, layer, expert in names():
        boxes = boxes_of(kind, layer, expert)
        if boxes is not None:
            given = {"name": name, "shape": SHAPES[kind], "dtype": "bfloat16"}
            metas.append(TensorMeta(**given, layout=Layout.from_boxes({rank: boxes})))
    return Manifest(tuple(metas))


def trainer(rank):
    rest, tensor = divmod(rank, TENSOR)
    data, stage = divmod(rest, PIPELINE)

    def boxes_of(kind, layer, expert):
        at = 0 if kind == "embed" else PIPELINE - 1 if layer is None else layer * PIPELINE // LAYERS
        if at != stage or (expert is not None and expert * DATA // EXPERTS != data):
            return None
        if kind in ("q", "k", "v"):
            return attention_of_groups(range(tensor * GROUPS // TENSOR, (tensor + 1) * GROUPS // TENSOR))[kind]
        return [rows("norm", 0, HIDDEN) if kind == "norm" else piece(kind, tensor, TENSOR)]

    return manifest(boxes_of, rank)


def engine(rank, size=4):
    place = rank % size

    def boxes_of(kind, layer, expert):
        if kind in ("k", "v"):
            head = place * GROUPS // size
            return [rows(kind, head * HEAD, (head + 1) * HEAD)]
        return [rows("norm", 0, HIDDEN) if kind == "norm" else piece(kind, place, size)]

    return manifest(boxes_of, rank)


def sides(num_engines=8, size=4):
    trainers = merge_manifests([trainer(rank) for rank in range(PIPELINE * TENSOR * DATA)])
    return trainers, merge_manifests([engine(rank, size) for rank in range(num_engines)])


@pytest.mark.parametrize(("num_engines", "size"), [(8, 4), (4, 4), (2, 2), (1, 1)])
def test_every_engine_rank_receives_its_boxes_and_not_a_byte_more(num_engines, size):
    source, sink = sides(num_engines, size)
    plan = plan_refit(source, sink)
    for rank in range(num_engines):
        arrived = {
            (meta.name, box): torch.zeros(box.shape, dtype=torch.int64)
            for meta in sink.tensors
            for box in meta.regions_on(rank)
        }
        for route in plan.routes:
            assert any(
                box.intersect(route.region) == route.region
                for box in source.by_name[route.region.name].regions_on(route.source_rank)
            )
            if rank in route.sink_ranks:
                ((_, box),) = [
                    (name, box)
                    for name, box in arrived
                    if name == route.region.name and box.intersect(route.region) == route.region
                ]
                arrived[route.region.name, box][route.region.index_within(box)] += 1
        assert all((times == 1).all() for times in arrived.values())
        nbytes = sum(2 * times.numel() for times in arrived.values())
        assert plan.bytes_received(rank) == plan.lower_bound(rank) == nbytes


def test_the_padding_of_the_vocabulary_never_travels():
    """The last of four engine ranks has rows 48-63 of the padded vocabulary, of which two are real."""
    plan = plan_refit(*sides())
    of_last = [route for route in plan.routes if route.region.name == "embed" and 3 in route.sink_ranks]
    assert [(route.region.offsets, route.region.shape) for route in of_last] == [((48, 0), (2, HIDDEN))]
    for replica in (0, 4):  # every real row once on each replica of the engine
        sent = (r for r in plan.routes if r.region.name == "head" and replica <= r.sink_ranks[0] < replica + 4)
        assert sum(route.nbytes for route in sent) == VOCABULARY * HIDDEN * 2


def test_stages_send_their_layers_and_data_ranks_their_experts():
    plan = plan_refit(*sides())
    for route in plan.routes:
        rest, _ = divmod(route.source_rank, TENSOR)
        data, stage = divmod(rest, PIPELINE)
        parts = route.region.name.split(".")
        if parts[0] == "layers":
            assert int(parts[1]) * PIPELINE // LAYERS == stage
        if "experts" in parts:
            assert int(parts[3]) * DATA // EXPERTS == data


def test_what_data_ranks_replicate_both_of_them_send():
    """All but the experts lies on both data ranks of a stage and a place; each sends half of it, a box more or less."""
    source, sink = sides(4, 4)
    plan = plan_refit(source, sink)
    largest = max(route.nbytes for route in plan.routes)
    for stage in range(PIPELINE):
        for tensor in range(TENSOR):
            ranks = [(data * PIPELINE + stage) * TENSOR + tensor for data in range(DATA)]
            one, other = map(plan.bytes_sent, ranks)
            assert abs(one - other) <= largest


def test_a_rank_that_tells_of_other_rows_than_it_should_leaves_a_hole_that_is_named():
    parts = [trainer(rank) for rank in range(PIPELINE * TENSOR * DATA)]
    for rank in (1, 5):  # tensor rank 1 of the first stage, on both data ranks
        layout = Layout.from_boxes({rank: [rows("embed", 32, 48)]})
        metas = (replace(meta, layout=layout) if meta.name == "embed" else meta for meta in parts[rank].tensors)
        parts[rank] = Manifest(tuple(metas))
    with pytest.raises(CoverageError, match=r"embed: no rank of the source holds \[2, 16\] at \[48, 0\]"):
        plan_refit(merge_manifests(parts), sides()[1])


def test_bytes_of_the_model_are_counted_once():
    source, sink = sides()
    once = sum(math.prod(SHAPES[kind]) * 2 for _, kind, _, _ in names())
    assert source.total_bytes == sink.total_bytes == once
