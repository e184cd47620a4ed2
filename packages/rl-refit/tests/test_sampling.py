"""Which chunks are digested, and how many of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_refit.digest import CHUNK_BYTES, COST, LARGEST_STRIDE, Boxes, Sample, VerificationShare
from rl_refit.layout import Region


@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    stride=st.integers(2, 9),
    first=st.integers(0, 50),
)
def test_as_many_refits_as_the_stride_see_every_byte_once(rows, stride, first):
    boxes = [(Region(f"w{i}", (3, 0), (n, CHUNK_BYTES // 8)), 4) for i, n in enumerate(rows)]  # half a chunk a row
    cut = Boxes(boxes)
    seen = [chunk for phase in range(first, first + stride) for chunk in Sample(stride=stride, phase=phase).of(cut)]
    assert len(seen) == len(set(seen))
    assert sum(chunk.numel for chunk in seen) == sum(box.numel for box, _ in boxes)
    assert all(chunk.numel * 4 <= CHUNK_BYTES for chunk in seen)


def test_every_byte_is_the_boxes_as_they_are_and_nothing_is_nothing():
    boxes = [(Region("w", (0,), (5 * CHUNK_BYTES,)), 2), (Region("empty", (0,), (0,)), 2)]
    assert Sample(stride=1).of(Boxes(boxes)) == (boxes[0][0],)
    assert Sample(stride=0).of(Boxes(boxes)) == ()


def test_a_negative_stride_is_refused():
    with pytest.raises(ValueError, match="stride=-1"):
        Sample(stride=-1)


@given(
    digest_s=st.floats(1e-6, 100),
    move_s=st.floats(1e-6, 100),
)
def test_auto_begins_with_every_byte_and_then_stays_below_its_share(digest_s, move_s):
    share = VerificationShare("auto")
    assert share.sample(1).stride == 1
    share.learn({"prepare": 0.0, "transfer": move_s, "verify": digest_s, "commit": 0.0})
    stride = share.sample(2).stride
    assert stride == LARGEST_STRIDE or digest_s / stride <= max(COST * move_s, 0.005) * 1.0001
    assert stride == 1 or digest_s / (stride / 2) > max(COST * move_s, 0.005) * 0.9999  # no thinner than needed


def test_what_was_measured_on_a_sample_is_scaled_to_all():
    share = VerificationShare("auto")
    share.learn({"transfer": 1.0, "verify": 2.0, "commit": 0.0})
    assert share.sample(2).stride == 8
    share.learn({"transfer": 1.0, "verify": 0.25, "commit": 0.0})
    assert share.sample(3).stride == 8


@pytest.mark.parametrize(("verify", "stride"), [("full", 1), ("sampled", 16), ("off", 0)])
def test_what_was_asked_for_is_not_changed_by_what_it_costs(verify, stride):
    share = VerificationShare(verify)
    share.learn({"transfer": 1e-3, "verify": 100.0, "commit": 0.0})
    assert share.sample(7).stride == stride
