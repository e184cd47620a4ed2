"""Layouts against torch.chunk itself, which cuts a tensor of indices the same way."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from rl_refit import Layout, RefitError, Region


def chunked(tensor, mesh_shape, sharded_dims, coordinate):
    """What `torch.chunk` leaves for one coordinate of the mesh; nothing where it makes fewer chunks."""
    for size, dim, position in zip(mesh_shape, sharded_dims, coordinate, strict=True):
        if dim is not None:
            pieces = tensor.chunk(size, dim) if tensor.size(dim) else [tensor] * size
            tensor = pieces[position] if position < len(pieces) else tensor.narrow(dim, 0, 0)
    return tensor


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=2)))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    return shape, mesh_shape, tuple(draw(dims) for _ in mesh_shape)


@given(layouts())
def test_every_rank_holds_what_torch_chunk_gives_it(case):
    shape, mesh_shape, sharded_dims = case
    indices = torch.arange(math.prod(shape)).view(shape)
    regions = Layout.from_placements(mesh_shape, sharded_dims).regions("w", shape)
    whole = Region("w", (0,) * len(shape), shape)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        expected = chunked(indices, mesh_shape, sharded_dims, coordinate)
        assert regions[rank].shape == tuple(expected.shape)
        assert torch.equal(indices[regions[rank].index_within(whole)], expected)


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


def test_a_dim_that_the_tensor_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"'w' has 1 dims, and its layout cuts dims \(1,\)"):
        Layout.from_placements((2,), (1,)).regions("w", (4,))


boxes = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 5))] * 2).map(
    lambda sides: Region("w", tuple(a for a, _ in sides), tuple(n for _, n in sides))
)


def elements(region):
    return set(itertools.product(*(range(a, a + n) for a, n in zip(region.offsets, region.shape, strict=True))))


@given(boxes, boxes)
def test_intersection_holds_exactly_the_shared_elements(one, other):
    shared = one.intersect(other)
    assert (elements(shared) if shared else set()) == elements(one) & elements(other)


def test_a_scalar_is_a_region_of_one_element():
    scalar = Region("s", (), ())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert Layout.from_placements((3,), (None,)).regions("s", ()) == dict.fromkeys(range(3), scalar)


def test_a_region_needs_as_many_offsets_as_sizes():
    with pytest.raises(ValueError, match=r"offsets=\(0,\) and shape=\(1, 2\) for 'w'"):
        Region("w", (0,), (1, 2))
