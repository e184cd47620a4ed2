"""Files that are on disk when the call returns: safetensors written tensor by tensor, JSON, and their digests.

Writing a safetensors file here and not by its library lets each tensor pass through memory alone, and hashes it on its
way; the library reads it. Format: 8 bytes of little-endian length, a JSON header of that length, the numbers.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "FileRecord", "TensorEntry", "digest_of", "sync_folder", "write_json", "write_safetensors"]

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names that safetensors gives to dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be the one that was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a safetensors file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Gives its numbers, when their turn comes."""

    @property
    def num_bytes(self) -> int:
        """Of its numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[TensorEntry]) -> FileRecord:
    """Write tensors one by one into a new file, and wait until they are on disk.

    Raises:
        OSError: it cannot be written, or exists.
        ValueError: safetensors has no name for a dtype.
    """
    entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # so that each begins at a multiple of its size
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in itertools.chain([_header(entries)], map(_numbers, entries)):
            file.write(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name=path.name, num_bytes=num_bytes, sha256=digest.hexdigest())


def write_json(path: Path, value: Any) -> FileRecord:
    """Write a value as JSON into a new file, and wait until it is on disk.

    Raises:
        OSError: it cannot be written, or exists.
    """
    data = json.dumps(value).encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(name=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(entries: Sequence[TensorEntry]) -> bytes:
    header: dict[str, object] = {}
    start = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise ValueError(f"{entry.key} is {entry.dtype}, which safetensors cannot hold: keep it in another dtype")
        end = start + entry.num_bytes
        header[entry.key] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _numbers(entry: TensorEntry) -> bytes | memoryview:
    tensor = entry.read().detach().to("cpu").contiguous()
    assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.key
    return tensor.reshape(-1).view(torch.uint8).numpy().data
