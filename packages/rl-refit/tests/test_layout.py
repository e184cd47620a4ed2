"""Layouts against torch.chunk itself, which cuts a tensor of indices the same way."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rl_refit.errors import RefitError
from rl_refit.layout import Layout, Region


def chunked(tensor, cuts):
    """What `torch.chunk` leaves after `cuts` of (pieces, dim, which one); nothing where it makes fewer chunks."""
    for size, dim, position in cuts:
        if dim is not None:
            pieces = tensor.chunk(size, dim) if tensor.size(dim) else [tensor] * size
            tensor = pieces[position] if position < len(pieces) else tensor.narrow(dim, 0, 0)
    return tensor


@st.composite
def meshes(draw, max_axes=3):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=max_axes)))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    return shape, mesh_shape, tuple(draw(dims) for _ in mesh_shape)


@settings(max_examples=400)
@given(meshes(), st.integers(0, 7))
def test_every_rank_holds_what_torch_chunk_gives_it(case, strided):
    """Axes cut from left to right, except for strided ones, which come last, from right to left."""
    shape, mesh_shape, dims = case
    strided_axes = tuple(axis for axis in range(len(mesh_shape)) if strided >> axis & 1 and dims[axis] is not None)
    layout = Layout(
        mesh_shape=mesh_shape,
        sharded_dims=dims,
        strided_axes=strided_axes,
        ranks=tuple(range(10, 10 + math.prod(mesh_shape))),
    )
    indices, whole = torch.arange(math.prod(shape)).view(shape), Region("w", (0,) * len(shape), shape)
    regions = layout.regions("w", shape)
    order = [axis for axis in range(len(mesh_shape)) if axis not in strided_axes] + list(strided_axes)[::-1]
    for rank, coordinate in zip(layout.ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        expected = chunked(indices, [(mesh_shape[axis], dims[axis], coordinate[axis]) for axis in order])
        assert regions[rank] == layout.regions_on(rank, "w", shape)
        assert sum(box.numel for box in regions[rank]) == expected.numel()
        assert all(torch.equal(indices[box.index_within(whole)], expected) for box in regions[rank])


@given(meshes(max_axes=2))
def test_the_ranks_of_a_mesh_hold_every_element_equally_often(case):
    shape, mesh_shape, dims = case
    times = torch.zeros(shape, dtype=torch.int64)
    whole = Region("w", (0,) * len(shape), shape)
    for boxes in Layout.from_placements(mesh_shape, dims).regions("w", shape).values():
        for box in boxes:
            times[box.index_within(whole)] += 1
    copies = math.prod(size for size, dim in zip(mesh_shape, dims, strict=True) if dim is None)
    assert (times == copies).all()


def test_fsdp_over_tensor_parallelism_cuts_what_tensor_parallelism_left():
    """Rows 0-7 over 2 × 2: tensor parallelism gives each of its ranks four rows, FSDP halves those."""
    layout = Layout.from_placements((2, 2), [_StridedShard(0, split_factor=2), Shard(0)])
    assert [box.offsets[0] for (box,) in layout.regions("w", (8,)).values()] == [0, 4, 2, 6]
    plain = Layout.from_placements((2, 2), [Shard(0), Shard(0)])
    assert [box.offsets[0] for (box,) in plain.regions("w", (8,)).values()] == [0, 2, 4, 6]


def test_two_strided_axes_cut_from_right_to_left():
    """Offsets as torch's compute_local_shape_and_global_offset gives them for ranks 0-7."""
    placements = [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]
    boxes = Layout.from_placements((2, 2, 2), placements).regions("w", (16, 4)).values()
    assert [box.offsets[0] for (box,) in boxes] == [0, 8, 4, 12, 2, 10, 6, 14]


def test_a_strided_placement_that_no_fsdp_makes_is_refused():
    with pytest.raises(RefitError, match=r"cuts 4 pieces, and the axes to its right make 2 of dim 0"):
        Layout.from_placements((2, 2), [_StridedShard(0, split_factor=4), Shard(0)])
    with pytest.raises(RefitError, match=r"the axes to its right make 1 of dim 0"):
        Layout.from_placements((2, 2), [_StridedShard(0, split_factor=2), Shard(1)])


def test_a_class_derived_from_shard_may_cut_elsewhere_and_is_refused():
    class OwnShard(Shard):
        pass

    with pytest.raises(RefitError, match="a refit knows the placements"):
        Layout.from_placements((2,), [OwnShard(0)])


def test_torchs_placements_are_taken_as_plain_data():
    assert Layout.from_placements((2, 3), [Shard(1), Replicate()]) == Layout.from_placements((2, 3), [1, None])


def test_a_plain_tensor_lies_whole_on_this_rank():
    assert Layout.from_tensor(torch.zeros(3)) == Layout.whole(0)


def test_a_placement_that_is_no_box_is_refused():
    with pytest.raises(RefitError, match=r"not Partial\(sum\)"):
        Layout.from_placements((2,), [Partial()])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"mesh_shape": (2,), "placements": ()}, "one placement for each axis"),
        ({"mesh_shape": (2,), "placements": (0,), "ranks": (0,)}, r"needs 2 distinct ranks; got ranks=\(0,\)"),
        ({"mesh_shape": (2,), "placements": (0,), "ranks": (1, 1)}, "2 distinct ranks"),
        ({"mesh_shape": (2,), "placements": (-1,)}, r"sharded_dims=\(-1,\)"),
        ({"mesh_shape": (0,), "placements": (None,)}, "not empty"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Layout.from_placements(**arguments)


def test_a_rank_that_the_layout_does_not_know_holds_nothing():
    assert Layout.whole(3).regions_on(0, "w", (4,)) == ()
    assert Layout.whole(3).regions_on(3, "w", (4,)) == (Region("w", (0,), (4,)),)


def test_empty_boxes_are_left_out():
    layout = Layout.from_placements((3,), (0,))
    assert layout.regions("w", (1,)) == {0: (Region("w", (0,), (1,)),), 1: (), 2: ()}
    assert layout.regions("w", (0,)) == {0: (), 1: (), 2: ()}


def test_a_dim_that_the_tensor_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"'w' has 1 dims, and its layout cuts dims \(1,\)"):
        Layout.from_placements((2,), (1,)).regions("w", (4,))


def test_boxes_are_held_in_their_order_and_must_be_inside():
    rows = [Region("any", (4, 0), (2, 3)), Region("other", (0, 0), (1, 3)), Region("any", (6, 0), (0, 3))]
    layout = Layout.from_boxes({5: rows, 2: []})
    assert layout.regions("w", (6, 3)) == {5: (Region("w", (4, 0), (2, 3)), Region("w", (0, 0), (1, 3))), 2: ()}
    with pytest.raises(ValueError, match=r"a box at \(4, 0\) of shape \(2, 3\) is not inside 'w' of shape \(5, 3\)"):
        layout.regions("w", (5, 3))
    with pytest.raises(ValueError, match="is not inside 'w'"):
        layout.regions("w", (6, 3, 1))


boxes = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 2).map(
    lambda sides: Region("w", tuple(a for a, _ in sides), tuple(n for _, n in sides))
)


def elements(region):
    return set(itertools.product(*(range(a, a + n) for a, n in zip(region.offsets, region.shape, strict=True))))


@given(st.lists(boxes, max_size=5))
def test_boxes_of_one_rank_are_refused_exactly_where_they_overlap(held):
    overlapping = any(elements(one) & elements(other) for one, other in itertools.combinations(held, 2))
    if overlapping:
        with pytest.raises(ValueError, match=r"the boxes of one rank must not overlap; on rank 1 these do: "):
            Layout.from_boxes({0: [], 1: held})
    else:
        Layout.from_boxes({0: [], 1: held})


def test_two_scalars_on_one_rank_overlap():
    with pytest.raises(ValueError, match="must not overlap"):
        Layout.from_boxes({0: [Region("s", (), ())] * 2})


@given(boxes, boxes)
def test_a_box_without_another_keeps_exactly_the_other_elements(one, other):
    parts = one.minus(other)
    assert set().union(*map(elements, parts)) == elements(one) - elements(other)
    assert sum(part.numel for part in parts) == len(elements(one) - elements(other))


@given(boxes, boxes)
def test_intersection_holds_exactly_the_shared_elements(one, other):
    shared = one.intersect(other)
    assert (elements(shared) if shared else set()) == elements(one) & elements(other)


def test_a_scalar_is_a_region_of_one_element():
    scalar = Region("s", (), ())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert Layout.from_placements((3,), (None,)).regions("s", ()) == dict.fromkeys(range(3), (scalar,))
    assert scalar.minus(scalar) == []


def test_a_region_needs_as_many_offsets_as_sizes():
    with pytest.raises(ValueError, match=r"offsets=\(0,\) and shape=\(1, 2\) for 'w'"):
        Region("w", (0,), (1, 2))


PROGRAM = Path(__file__).parent / "programs" / "layout_of_dtensors.py"


def test_layouts_of_real_dtensors_are_what_the_ranks_hold(tmp_path):
    """Four processes over gloo; the program asserts, and every rank prints `ok`."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path / "rendezvous"), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        results = [(*process.communicate(timeout=120), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for out, err, code in results:
        assert code == 0, err
        assert out.endswith("ok\n")  # gloo may print before it
