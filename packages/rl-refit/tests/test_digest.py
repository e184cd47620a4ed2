"""Digests against the formula in plain Python integers, and against what they promise to notice."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_refit import Digest, digest, digest_tensor
from rl_refit.digest import ROW_WORDS, _weights, digest_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]
DTYPES += [torch.float8_e4m3fn, torch.complex64, torch.uint8]


def splitmix64(count):
    """As its authors print it: a counter, and a mix of its bits."""
    state, mask = 0, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield (z ^ (z >> 31)) | 1


def digest_in_python(data: bytes) -> str:
    weights, total = list(splitmix64(256)), hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    num_rows = len(data) // 2048
    rows = [
        [int.from_bytes(data[i + 8 * c : i + 8 * c + 8], "little") for c in range(256)]
        for i in range(0, 2048 * num_rows, 2048)
    ]
    for first in range(0, num_rows, 512):
        block = rows[first : first + 512]
        sums = [sum(w * x for w, x in zip(weights, row, strict=True)) for row in block]
        sums += [sum(column) for column in zip(*block, strict=True)]
        total.update(b"".join((value % 2**64).to_bytes(8, "little") for value in sums))
    total.update(data[2048 * num_rows :])
    return total.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 7, 2047, 2048, 2049, 10_000, 2**20, 2**20 + 2048 * 3 + 13])
def test_the_digest_is_the_formula(size):
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    assert digest_tensor(tensor) == digest_in_python(bytes(tensor.tolist()))


def test_devices_without_an_integer_product_get_the_same_sums():
    words = torch.randint(-(2**63), 2**63 - 1, (5, ROW_WORDS))
    assert torch.equal((words * _weights(words.device)).sum(dim=1), torch.mv(words, _weights(words.device)))


def random(dtype, shape=(40, 30)):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).squeeze(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_any_strides(dtype):
    tensor = random(dtype)
    assert digest_tensor(tensor.t()) == digest_tensor(tensor.t().contiguous()) != digest_tensor(tensor)
    assert digest_tensor(tensor[1::2, 3:]) == digest_tensor(tensor[1::2, 3:].clone())
    assert digest_tensor(tensor[0, 0]) == digest_tensor(tensor[:1, :1])


def test_one_element_of_any_stride_has_a_digest():
    one = torch.arange(8, dtype=torch.int16)[4::4]
    assert one.stride() == (4,)
    assert digest_tensor(one) == digest_tensor(torch.tensor([4], dtype=torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flipped_bit_anywhere_is_caught(dtype):
    tensor = random(dtype, (2, 1100 // dtype.itemsize))  # a row and a tail
    before, raw = digest_tensor(tensor), tensor.view(-1).view(torch.uint8)
    for byte in range(0, raw.numel(), 3):
        bit = 1 << byte % 8
        raw[byte] ^= bit
        assert digest_tensor(tensor) != before
        raw[byte] ^= bit
    assert digest_tensor(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("values", [(1, -1), (1, 2), (0, 1), (0, -1)], ids=str)
def test_two_elements_that_changed_places_are_caught(dtype, values):
    """Also where they differ in one top bit only, to which a weighted sum alone is blind."""
    tensor = torch.full((600 * 8 // dtype.itemsize,), values[0], dtype=dtype)  # two rows and a tail
    digests = set()
    for place in range(0, tensor.numel(), 5):
        tensor[place] = values[1]
        digests.add(digest_tensor(tensor))
        tensor[place] = values[0]
    assert len(digests) == -(-tensor.numel() // 5)


def test_rows_that_changed_places_are_caught():
    identity = torch.eye(100)
    swapped = identity[torch.tensor([1, 0, *range(2, 100)])]
    assert digest_tensor(swapped) != digest_tensor(identity)


@pytest.mark.parametrize("num_words", [ROW_WORDS, 512 * ROW_WORDS])
def test_stretches_that_changed_places_are_caught(num_words):
    one, other = torch.zeros(2 * num_words), torch.ones(2 * num_words)
    assert digest_tensor(torch.cat([one, other])) != digest_tensor(torch.cat([other, one]))


def test_a_zeroed_tensor_and_a_longer_one_are_caught():
    tensor = random(torch.float32)
    assert digest_tensor(torch.zeros_like(tensor)) != digest_tensor(tensor)
    assert len({digest_tensor(torch.zeros(n, dtype=torch.int8)) for n in range(20)}) == 20


@given(st.integers(0, 9), st.integers(0, 5000))
def test_where_a_tensor_starts_in_its_storage_does_not_matter(start, size):
    storage = torch.arange(5009).to(torch.uint8)
    part = storage[start : start + size]
    assert digest_tensor(part) == digest_tensor(part.clone())


def test_digests_of_a_set_name_what_differs():
    one, other = Digest({"a": "1", "b": "2", "c": "3"}), Digest({"c": "3", "b": "0", "d": "4"})
    assert one.differing(other) == ("a", "b", "d")
    assert one.hex == Digest({"c": "3", "b": "2", "a": "1"}).hex != other.hex


def test_tensors_digested_together_are_digested_as_each_alone(monkeypatch):
    tensors = [torch.randn(n, 300).t() for n in (0, 1, 5, 900)] + [torch.arange(7)[1:], torch.tensor(3.0)]
    alone = [digest_tensor(tensor) for tensor in tensors]
    assert [*digest_tensors(tensors)] == alone
    monkeypatch.setattr(digest, "_READ_BACK_BYTES", 1)
    assert [*digest_tensors(tensors)] == alone


def test_what_was_summed_is_read_back_once_for_many_tensors(monkeypatch):
    readings, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (readings.append(tensor.nbytes), cpu(tensor))[1])
    tensors = [torch.ones(2**20) for _ in range(16)]  # 64 MiB
    assert len({*digest_tensors(tensors)}) == 1
    assert len(readings) == 1
    assert readings[0] < 2**19
