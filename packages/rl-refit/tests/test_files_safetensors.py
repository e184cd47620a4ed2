"""Safetensors files against the library that the world reads them with, in both directions; and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_refit import RefitError
from rl_refit.transports.base import Watch
from rl_refit.transports.file_writer import FileWriter
from rl_refit.transports.safetensors_file import SafetensorsFile, lay_out, write_header

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64]


def random(dtype, shape, *, seed=0):
    raw = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).squeeze(-1)


def same(one, other):
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tolist().__repr__() == other.tolist().__repr__()
    )


def write(path, tensors, metadata=None):
    entries = lay_out((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    header = write_header(entries, metadata or {})
    with FileWriter(path, Watch(deadline_s=60.0)) as file:
        file.write(header)
        for name, tensor in tensors.items():
            file.seek(len(header) + entries[name].start)
            file.write(tensor)
        file.publish()


def tensors_of_every_dtype():
    shapes = [(3, 5), (7,), (), (2, 0, 3), (1, 1, 9)]
    return {f"{dtype}.{i}": random(dtype, shape, seed=i) for dtype in DTYPES for i, shape in enumerate(shapes)}


def test_the_library_reads_what_we_write(tmp_path):
    tensors = tensors_of_every_dtype()
    write(tmp_path / "ours.safetensors", tensors, {"version": "7", "manifest": "abc"})
    read = load_file(tmp_path / "ours.safetensors")
    assert set(read) == set(tensors)
    assert all(same(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"version": "7", "manifest": "abc"}


def test_we_read_what_the_library_writes(tmp_path):
    tensors = tensors_of_every_dtype()
    save_file(tensors, tmp_path / "theirs.safetensors", {"who": "they"})
    file = SafetensorsFile(tmp_path / "theirs.safetensors")
    assert file.metadata == {"who": "they"}
    assert set(file.entries) == set(tensors)
    assert all(same(file.tensor(name), tensor) for name, tensor in tensors.items())


def test_strided_tensors_are_written_row_by_row(tmp_path):
    tensor = torch.arange(24.0).view(4, 6)
    write(tmp_path / "a.safetensors", {"t": tensor.t(), "cut": tensor[1:3, 2:5], "step": tensor[::2, ::3]})
    read = load_file(tmp_path / "a.safetensors")
    assert torch.equal(read["t"], tensor.t())
    assert torch.equal(read["cut"], tensor[1:3, 2:5])
    assert torch.equal(read["step"], tensor[::2, ::3])


def test_every_tensor_begins_at_a_multiple_of_its_element(tmp_path):
    tensors = {"a": random(torch.int8, (3,)), "b": random(torch.float64, (5,)), "c": random(torch.bfloat16, (7,))}
    write(tmp_path / "a.safetensors", tensors)
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert all(file.tensor(name).data_ptr() % tensor.element_size() == 0 for name, tensor in tensors.items())


def test_a_view_keeps_the_mapping_and_writing_to_it_changes_no_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"w": torch.ones(1000)})
    before = path.read_bytes()
    view = SafetensorsFile(path).tensor("w")
    path.unlink()
    assert view.sum() == 1000
    path.write_bytes(before)
    view = SafetensorsFile(path).tensor("w")
    view.zero_()
    assert path.read_bytes() == before


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=8))
def test_any_set_of_tensors_makes_the_trip(tmp_path_factory, kinds):
    path = tmp_path_factory.mktemp("trip") / "a.safetensors"
    tensors = {f"{i}": random(dtype, shape, seed=i) for i, (dtype, shape) in enumerate(kinds)}
    write(path, tensors)
    ours, theirs = SafetensorsFile(path), load_file(path)
    for name, tensor in tensors.items():
        assert same(ours.tensor(name), tensor)
        assert same(theirs[name], tensor)


def raw_file(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(start, end, *, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "size", "length", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, None, "'b' begins at byte 4 and overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, None, "'b' begins at byte 12 and leaves a hole"),
        ({"a": entry(0, 8)}, 4, None, "'a', ends at 8: the file is truncated"),
        ({"a": entry(0, 8)}, 12, None, "'a', ends at 8: the file is too long"),
        ({"a": entry(0, 2**62)}, 8, None, "the file is truncated"),
        ({"a": entry(0, 8, shape=[3])}, 8, None, "'a' is F32 of shape .3., 12 bytes, and lies at 0:8"),
        ({"a": entry(0, 8, shape=[-1, -2])}, 8, None, "no safetensors header"),
        ({"a": entry(0, 8, shape=[2.0])}, 8, None, "no safetensors header"),
        ({"a": entry(0, 8, shape=[True, 2])}, 8, None, "no safetensors header"),
        ({"a": entry(8, 0)}, 8, None, "no safetensors header"),
        ({"a": entry(0, 8, dtype="F33")}, 8, None, "'a' is F33"),
        ({"a": {"dtype": "F32"}}, 8, None, "no safetensors header: KeyError: 'shape'"),
        ({"__metadata__": {"a": 3}}, 0, None, "metadata that is no text"),
        ([], 0, None, "no safetensors header"),
        (b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": 1}', 0, None, "a name comes twice"),
        (b"\xff\xfe", 0, None, "no safetensors header"),
        ({}, 0, 2**63 + 5, "it is truncated, or another format"),
        ({}, 0, 400, "it is truncated, or another format"),
    ],
)
def test_a_header_that_is_not_true_is_refused(tmp_path, header, size, length, message):
    path = raw_file(tmp_path / "bad.safetensors", header, b"\0" * size, length=length)
    with pytest.raises(RefitError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"a": torch.ones(5), "b": torch.ones(3, dtype=torch.int8)}, {"version": "1"})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(RefitError, match="truncated"):
            SafetensorsFile(path)


def test_what_the_format_has_no_word_for_is_refused_before_writing():
    with pytest.raises(RefitError, match=r"'z' is of torch.complex128, and safetensors has F64"):
        lay_out([("z", torch.complex128, (2,))])
    with pytest.raises(RefitError, match="called 'z'"):
        lay_out([("z", torch.int8, (2,)), ("z", torch.int16, (2,))])
