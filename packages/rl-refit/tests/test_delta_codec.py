"""Deltas: every bit makes the trip, both ways; wrong bases and broken deltas are refused; sizes are the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rl_refit import DigestError, RefitError, digest_tensor
from rl_refit.delta import codec
from rl_refit.delta.codec import apply, encode, inspect, revert
from rl_refit.delta.gaps import pack_gaps, unpack_gaps

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8]
DTYPES += [torch.int16, torch.int64, torch.bool, torch.complex64, torch.complex128]


def random(dtype, shape, *, seed=0):
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).squeeze(-1)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def change(base, share, *, seed=1):
    """A copy of which about `share` of the elements are others; and how many words of at most 8 bytes that are."""
    chosen = torch.rand(base.shape, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(chosen, random(base.dtype, base.shape, seed=seed), base)
    word = min(8, base.element_size())
    return new, int((bits(base).view(-1, word) != bits(new).view(-1, word)).any(dim=1).sum())


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    share=st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.5, 0.7, 1.0]),
    seed=st.integers(0, 99),
    segment_bytes=st.sampled_from([64, 1024, 4 * 2**20]),
)
@example(dtype=torch.bool, shape=(5, 5, 36), share=0.002, seed=1, segment_bytes=1024)  # one gap, with a stride of 4
def test_a_delta_leads_to_the_new_tensor_and_back_bit_for_bit(dtype, shape, share, seed, segment_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SEGMENT_BYTES", segment_bytes)
        base = random(dtype, shape, seed=seed)
        new, num_changed = change(base, share, seed=seed + 1)
        before = base.clone()
        delta = encode(base, new)
        info = apply(base, delta)
        assert torch.equal(bits(base), bits(new))
        assert torch.equal(bits(encode(new, new)), bits(encode(base, base)))
        revert(base, delta)
    assert torch.equal(bits(base), bits(before))
    assert info.changed == num_changed
    assert (info.nbytes, delta.numel() % 8) == (delta.numel(), 0)
    assert (info.base_digest, info.result_digest) == (digest_tensor(before), digest_tensor(new))


def test_zeros_of_either_sign_and_nans_are_told_apart_by_their_bits():
    base = torch.tensor([0.0, -0.0, float("nan"), float("nan"), 1.0])
    new = torch.tensor([-0.0, -0.0, float("nan"), -float("nan"), 1.0])
    delta = encode(base, new)
    assert inspect(delta).changed == 2
    apply(base, delta)
    assert torch.equal(bits(base), bits(new))


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_strided_tensors_and_any_place_in_memory(share):
    storage = random(torch.int8, (50_003,))
    base, (new, _) = storage[3:49_003].view(140, 350), change(storage[3:49_003].view(140, 350), share)
    assert torch.equal(encode(base, new), encode(base.clone(), new.clone()))
    assert torch.equal(encode(base.t(), new.t()), encode(base.t().contiguous(), new.t().contiguous()))
    carrier = torch.empty(encode(base, new).numel() + 1, dtype=torch.uint8)
    carrier[1:] = encode(base, new)  # a delta that does not begin at a multiple of eight bytes
    apply(base, carrier[1:])
    assert torch.equal(base, new)


def test_sizes_are_the_formula():
    """bfloat16: a header, a row a segment, and for each change two bytes of value and one or two of gap."""
    base = random(torch.bfloat16, (3 * 2**21,))
    new = base.clone()
    elements = new.view(torch.int16)
    elements[: 2**21 : 100] ^= 1
    elements[2**21 : 2 * 2**21 : 1000] ^= 1
    elements[2 * 2**21 :] ^= 1
    info = inspect(encode(base, new))
    kinds = [(segment.kind, segment.changed, segment.gap_bytes) for segment in info.segments]
    assert kinds == [("sparse", 20_972, 1), ("sparse", 2_098, 2), ("dense", 2**21, 0)]
    assert [segment.nbytes(2) for segment in info.segments] == [41_944 + 20_976, 2 * 4_200, 2**22]  # in multiples of 8


def test_a_segment_is_written_whole_where_that_is_less():
    base = random(torch.bfloat16, (4096,))
    for share, kind in [(0.0, "unchanged"), (0.1, "sparse"), (0.6, "sparse"), (0.75, "dense"), (1.0, "dense")]:
        new = base.clone()
        bits(new)[: int(8192 * share) // 2 * 2 : 2] ^= 1
        info = inspect(encode(base, new))
        assert [segment.kind for segment in info.segments] == [kind]
        assert info.nbytes <= base.nbytes + info.payload_start


@given(st.lists(st.integers(0, 2**34), max_size=30) | st.lists(st.integers(0, 600), max_size=300))
def test_gaps_of_any_size_make_the_trip(gaps):
    positions = torch.tensor([sum(gaps[: i + 1]) + i for i in range(len(gaps))], dtype=torch.int64)
    width, units = pack_gaps(torch.tensor(gaps, dtype=torch.int64))
    assert torch.equal(unpack_gaps(units, width), positions)


@pytest.mark.parametrize("gap", [0, 254, 255, 256, 509, 510, 65534, 65535, 65536, 2**32 - 2, 2**32 - 1, 2**32])
def test_gaps_at_the_edges_of_a_unit(gap):
    width, units = pack_gaps(torch.tensor([gap, 0, gap]))
    assert unpack_gaps(units, width).tolist() == [gap, gap + 1, 2 * gap + 2]


def test_a_delta_is_applied_once():
    base = random(torch.float32, (1000,))
    new, _ = change(base, 0.01)
    delta = encode(base, new)
    apply(base, delta)
    with pytest.raises(DigestError, match="this is not the base of the delta: its digest is"):
        apply(base, delta)
    assert torch.equal(bits(base), bits(new))


def test_a_wrong_base_is_refused_and_left_alone():
    base, other = random(torch.bfloat16, (64, 64)), random(torch.bfloat16, (64, 64), seed=5)
    delta, before = encode(base, change(base, 0.05)[0]), other.clone()
    with pytest.raises(DigestError, match=f"the delta needs {digest_tensor(base)}"):
        apply(other, delta)
    assert torch.equal(bits(other), bits(before))
    with pytest.raises(RefitError, match=r"4,096 elements of 2 bytes does not fit \[10\] in torch.float32"):
        apply(torch.zeros(10), delta)
    with pytest.raises(ValueError, match="contiguous tensor"):
        apply(base.t(), delta)


@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_a_flipped_bit_or_a_cut_anywhere_is_refused_and_the_base_left_alone(share):
    base = random(torch.bfloat16, (20, 30))
    delta, before = encode(base, change(base, share)[0]), base.clone()
    for byte in range(0, delta.numel(), 1 if share < 1.0 else 7):
        broken = delta.clone()
        broken[byte] ^= 1 << byte % 8
        with pytest.raises(RefitError):
            apply(base, broken)
        with pytest.raises(RefitError):
            apply(base, delta[:byte])
    with pytest.raises(RefitError, match="truncated or corrupted"):
        apply(base, torch.cat([delta, delta[:8]]))
    assert torch.equal(bits(base), bits(before))
    assert inspect(delta).numel == 600


def test_what_is_no_delta_is_refused():
    with pytest.raises(RefitError, match="no delta"):
        inspect(torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(RefitError, match="it is truncated, or no delta"):
        inspect(torch.zeros(100))


def test_tensors_of_two_kinds_have_no_delta():
    for other in [torch.zeros(3), torch.zeros(4, dtype=torch.float16), torch.zeros(2, 2)]:
        with pytest.raises(ValueError, match="a delta leads from a tensor to another one of its kind"):
            encode(torch.zeros(4), other)


def test_a_tensor_that_changes_while_it_is_encoded_is_noticed(monkeypatch):
    """The digest is taken after the changes were found; the base comes back as it was."""
    base = random(torch.float32, (500,))
    new, _ = change(base, 0.1)
    digest = codec.digest_tensor

    def train_on(tensor):
        if tensor is new:
            new[:3] += 1
        return digest(tensor)

    monkeypatch.setattr(codec, "digest_tensor", train_on)
    delta, before = encode(base, new), base.clone()
    with pytest.raises(DigestError, match="the delta leads to"):
        apply(base, delta)
    assert torch.equal(bits(base), bits(before))
