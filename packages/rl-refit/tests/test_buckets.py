"""Buckets: every element in one piece, in order, aligned, and no bucket above its size."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_refit.buckets import ALIGNMENT, pack, size_of, split
from rl_refit.layout import Region

shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)


@given(shapes, st.integers(1, 50))
def test_pieces_in_order_are_the_box_flattened(shape, max_elements):
    values = torch.arange(math.prod(shape)).view(shape)
    box = Region("w", (7,) * len(shape), shape)
    pieces = list(split(box, max_elements=max_elements))
    assert all(0 < piece.numel <= max_elements for piece in pieces)
    flat = [values[piece.index_within(box)].flatten() for piece in pieces]
    assert torch.equal(torch.cat(flat) if flat else values.flatten(), values.flatten())


def test_rows_stay_together_where_they_fit():
    box = Region("w", (0, 0), (5, 10))
    assert [piece.shape for piece in split(box, max_elements=25)] == [(2, 10), (2, 10), (1, 10)]
    assert [piece.shape for piece in split(box, max_elements=6)][:2] == [(1, 6), (1, 4)]


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8, 16])), max_size=8), st.sampled_from([512, 1024, 4096]))
def test_pieces_lie_aligned_in_their_bucket_and_do_not_overlap(tensors, bucket_bytes):
    regions = [(Region(f"w{i}", (0,) * len(s), s), itemsize) for i, (s, itemsize) in enumerate(tensors)]
    buckets = pack(regions, bucket_bytes=bucket_bytes)
    for bucket in buckets:
        assert bucket
        for one, following in itertools.pairwise(bucket):
            assert one.start + one.nbytes <= following.start < one.start + one.nbytes + ALIGNMENT
        assert bucket[0].start == 0
        assert all(p.start % ALIGNMENT == 0 and p.start + p.nbytes <= size_of(bucket) <= bucket_bytes for p in bucket)
        assert size_of(bucket) == bucket[-1].start + bucket[-1].nbytes
    packed = sum(piece.nbytes for bucket in buckets for piece in bucket)
    assert packed == sum(region.numel * itemsize for region, itemsize in regions)


@given(st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8, 16])), max_size=8))
def test_without_a_limit_all_boxes_travel_uncut_in_one_bucket(tensors):
    regions = [(Region(f"w{i}", (0,) * len(s), s), itemsize) for i, (s, itemsize) in enumerate(tensors)]
    buckets = pack(regions, bucket_bytes=None)
    assert len(buckets) == any(region.numel for region, _ in regions)
    assert [piece.region for bucket in buckets for piece in bucket] == [r for r, _ in regions if r.numel]


def test_a_tensor_larger_than_a_bucket_is_split_and_fills_buckets():
    """5 rows of 300 bytes into 512: a row each, since a piece is a box; 1-D is cut where the bucket ends."""
    rows = pack([(Region("w", (0, 0), (5, 300)), 1)], bucket_bytes=512)
    assert [[piece.region.shape for piece in bucket] for bucket in rows] == [[(1, 300)]] * 5
    flat = pack([(Region("w", (0,), (700,)), 2)], bucket_bytes=512)
    assert [piece.region.offsets[0] for bucket in flat for piece in bucket] == [0, 256, 512]


@pytest.mark.parametrize("bucket_bytes", [0, -512, 100, 513])
def test_a_bucket_that_is_not_aligned_is_refused(bucket_bytes):
    with pytest.raises(ValueError, match=f"positive multiple of 512 bytes; got bucket_bytes={bucket_bytes}"):
        pack([], bucket_bytes=bucket_bytes)
