"""Which chunks are digested, and how many of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit, digest
from rl_refit.digest import CHUNK_BYTES, Boxes, Sample, choose_sample
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


@pytest.mark.parametrize(
    ("verify", "refit", "nbytes", "stride"),
    [
        ("full", 7, 10**12, 1),
        ("off", 1, 10, 0),
        ("sampled", 1, 10**12, 1),  # the first is compared whole
        ("sampled", 7, 10**12, 16),
        ("sampled", 7, 64 * 2**20, 1),  # what costs nothing is compared whole
    ],
)
def test_what_is_compared_follows_from_what_was_asked_for_and_how_much_there_is(verify, refit, nbytes, stride):
    assert choose_sample(verify, refit=refit, largest_bytes=nbytes).stride == stride


def test_sixteen_sampled_refits_in_a_row_begin_with_every_chunk_once():
    samples = [choose_sample("sampled", refit=refit, largest_bytes=10**9) for refit in range(100, 116)]
    assert {sample.phase % 16 for sample in samples} == set(range(16))


def test_the_bytes_of_a_sample_are_those_of_its_chunks():
    boxes = Boxes([(Region("w", (0,), (5 * CHUNK_BYTES,)), 2), (Region("v", (0,), (3,)), 4)])
    assert boxes.nbytes == boxes.nbytes_of(Sample()) == 10 * CHUNK_BYTES + 12
    assert boxes.nbytes_of(Sample(stride=0)) == 0
    assert sum(boxes.nbytes_of(Sample(stride=4, phase=phase)) for phase in range(4)) == boxes.nbytes


def test_the_report_says_what_share_was_not_compared(monkeypatch):
    monkeypatch.setattr(digest, "SMALL_BYTES", 0)
    monkeypatch.setattr(digest, "CHUNK_BYTES", 2**10)
    policy, engine = nn.Linear(256, 64, bias=False), nn.Linear(256, 64, bias=False)  # 64 chunks of one row
    refit = Refit(ModuleSource(policy), ModuleSink(engine))
    assert refit(version=1).uncompared == 0
    report = refit(version=2)
    assert (report.verified, report.uncompared) == ("1/16 of the chunks", 60 / 64)
    assert "verified 1/16 of the chunks (94 % not compared), digest" in report.explain()
    assert torch.equal(policy.weight, engine.weight)
