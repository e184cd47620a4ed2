"""Safetensors files: laid out, and read as views of a mapping, with nothing but torch.

The format is eight bytes of little-endian length, a JSON header of that length, and the tensors without any hole
between them. Here tensors of larger elements come first, so that each begins at a multiple of its element's bytes.
Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from rl_refit.errors import RefitError

__all__ = ["Entry", "SafetensorsFile", "lay_out", "write_header"]

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES: Final = 8
_LONGEST_HEADER: Final = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the end of the header."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind its last one."""
        return self.start + self.nbytes


def lay_out(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Where each tensor, given by name, dtype and shape, lies in a file.

    Raises:
        RefitError: Two have one name, or the format has no word for a dtype.
    """
    entries: dict[str, Entry] = {}
    start = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        if dtype not in _NAMES:
            raise RefitError(f"{name!r} is of {dtype}, and safetensors has {', '.join(_NAMES.values())}", tensor=name)
        if name in entries:
            raise RefitError(f"two tensors of one file are called {name!r}", tensor=name)
        entries[name] = Entry(dtype, shape, start)
        start = entries[name].end
    return entries


def write_header(entries: Mapping[str, Entry], metadata: Mapping[str, str], *, length: int = 0) -> bytes:
    """What comes before the tensors, in a multiple of 8 bytes and at least `length`."""
    plain: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        offsets = [entry.start, entry.end]
        plain[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(plain, separators=(",", ":")).encode()
    nbytes = max(-(-len(text) // 8) * 8, length - _LENGTH_BYTES)
    return nbytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(nbytes)


@final
class SafetensorsFile:
    """A file, mapped: its tensors are views, read from disk when they are looked at, and never written back.

    The mapping lives as long as any of the views.

    Args:
        path: Of the file.

    Raises:
        RefitError: It is truncated, its header is no safetensors header, or tensors overlap, leave holes, or reach
            beyond the end; says which file and which tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            nbytes = file.seek(0, 2)
            if nbytes < _LENGTH_BYTES:
                raise RefitError(f"{path}: {nbytes} bytes are no safetensors file: it is truncated")
            # A private copy of every page that somebody writes, of which there is none: the file stays as it is.
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self._mapping[:_LENGTH_BYTES], "little")
        if length > _LONGEST_HEADER or _LENGTH_BYTES + length > nbytes:
            raise RefitError(
                f"{path}: {nbytes:,} bytes, and a header of {length:,}: it is truncated, or another format"
            )
        self._data_start = _LENGTH_BYTES + length
        self.metadata, self.entries = _read_header(path, self._mapping[_LENGTH_BYTES : self._data_start])
        _check_extents(path, self.entries, nbytes - self._data_start)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, as a view of the mapping.

        Raises:
            KeyError: The file has none.
        """
        entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        start = self._data_start + entry.start
        flat = self._bytes[start : start + entry.nbytes]
        if start % entry.dtype.itemsize:  # other writers do not align
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def read_ahead(self, name: str) -> None:
        """Have the system begin to read a tensor from disk, where it can."""
        entry = self.entries[name]
        if entry.nbytes and hasattr(self._mapping, "madvise"):
            first = (self._data_start + entry.start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapping.madvise(mmap.MADV_WILLNEED, first, self._data_start + entry.end - first)


def _read_header(path: Path, text: bytes) -> tuple[dict[str, str], dict[str, Entry]]:
    try:
        plain = json.loads(text, object_pairs_hook=_without_duplicates)
        metadata = {key: _read_text(value) for key, value in plain.pop("__metadata__", {}).items()}
        return metadata, {name: _read_entry(name, row) for name, row in plain.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefitError(f"{path}: no safetensors header: {type(error).__name__}: {error}") from error


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"metadata that is no text: {value!r}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a name comes twice")
    return keys


def _read_entry(name: str, row: dict[str, Any]) -> Entry:
    dtype, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
    numbers = (*shape, start, end)
    if dtype not in _DTYPES or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name!r} is {dtype} of shape {shape} at {start}:{end}")
    entry = Entry(_DTYPES[dtype], tuple(shape), start)
    if entry.end != end:
        raise ValueError(f"{name!r} is {dtype} of shape {shape}, {entry.nbytes:,} bytes, and lies at {start}:{end}")
    return entry


def _check_extents(path: Path, entries: Mapping[str, Entry], nbytes: int) -> None:
    """Every byte belongs to one tensor."""
    in_order = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    ends = [0, *(entry.end for _, entry in in_order)]
    for (name, entry), end in zip(in_order, ends, strict=False):
        if entry.start != end:
            what = "overlaps what is before it" if entry.start < end else "leaves a hole before it"
            raise RefitError(f"{path}: {name!r} begins at byte {entry.start:,} and {what}, which ends at {end:,}")
    if ends[-1] != nbytes:
        last = in_order[-1][0] if in_order else None
        raise RefitError(
            f"{path}: {nbytes:,} bytes of data, and the last tensor, {last!r}, ends at {ends[-1]:,}: "
            f"the file is {'truncated' if nbytes < ends[-1] else 'too long'}"
        )
