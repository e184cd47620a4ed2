"""Names, shapes and dtypes of a Hugging Face folder's weights, from the headers of its safetensors files alone.

A file begins with the length of its header, 8 bytes little-endian, and the header, JSON of `{name: {"dtype", "shape",
"data_offsets"}}` with offsets from the header's end; what follows has no holes.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_refit.errors import RefitError
from rl_refit.manifest import Manifest

__all__ = ["Checkpoint", "CheckpointTensor", "read_checkpoint"]

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTensor:
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without the prefix."""
    tied_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What `explain` needs to know of a model."""

    tensors: tuple[CheckpointTensor, ...]

    num_kv_heads: int | None = None
    """Key and value heads, from config.json; None where it does not say."""

    manifest: Manifest | None = None
    """Where the checkpoint was a saved manifest: that, with the layouts that it had."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a Hugging Face folder with safetensors files, or a manifest that `Manifest.to_json` wrote.

    The head of a model without `lm_head.weight` is taken to be tied to its embedding, unless config.json denies it.

    Raises:
        FileNotFoundError: There is nothing to read at `path`, or the index names a file that is missing.
        ValueError: A file is not what it should be; says which, and what is wrong with it.
    """
    if path.is_file():
        return _of_manifest(_manifest(path))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder of safetensors files nor a saved manifest")
    headers = {file: _read_header(file) for file in _files(path)}
    found = [tensor for tensors in headers.values() for tensor in tensors]
    config = _read_json(path / "config.json") if (path / "config.json").is_file() else {}
    text_config = config.get("text_config", config)
    num_kv_heads = text_config.get("num_key_value_heads") if isinstance(text_config, dict) else None
    return Checkpoint(
        tensors=_with_tied_head(_in_order(path, headers, found), config),
        num_kv_heads=num_kv_heads if isinstance(num_kv_heads, int) else None,
    )


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.from_json(path.read_text())
    except (RefitError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: {error}; give a folder of safetensors files or what Manifest.to_json wrote"
        ) from error


def _of_manifest(manifest: Manifest) -> Checkpoint:
    tensors = (
        CheckpointTensor(name=meta.name, shape=meta.shape, dtype=meta.dtype, tied_to=meta.tied_to)
        for meta in manifest.tensors
    )
    return Checkpoint(tensors=tuple(tensors), manifest=manifest)


def _files(folder: Path) -> list[Path]:
    if not (folder / _INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has neither {_INDEX} nor any *.safetensors file")
        return files
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / _INDEX} has no weight_map of names to files")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} misses {len(missing)} of {len(files)} files of its index, {', '.join(missing[:3])} among them; "
            f"shapes stand in the files, so download them, or at least the first megabytes of each"
        )
    return files


def _in_order(
    folder: Path, headers: dict[Path, list[CheckpointTensor]], found: list[CheckpointTensor]
) -> list[CheckpointTensor]:
    """Every name once, in the order of the files, and no other names than the index has."""
    by_name = {tensor.name: tensor for tensor in found}
    if len(by_name) != len(found):
        twice = sorted(name for name in by_name if sum(name == tensor.name for tensor in found) > 1)
        raise ValueError(
            f"{folder}: more than one file has {', '.join(twice[:3])}; keep one set of files in the folder"
        )
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX)["weight_map"]
        lost = [name for name in weight_map if name not in {t.name for t in headers[folder / weight_map[name]]}]
        if lost:
            raise ValueError(f"{folder}: {weight_map[lost[0]]} does not hold {lost[0]}, which the index places there")
    return found


def _with_tied_head(tensors: list[CheckpointTensor], config: dict[str, Any]) -> tuple[CheckpointTensor, ...]:
    by_name = {tensor.name: tensor for tensor in tensors}
    embedding = next((tensor for name, tensor in by_name.items() if name.endswith("embed_tokens.weight")), None)
    says = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings"))
    if embedding is None or says is False or (says is None and "lm_head.weight" in by_name):
        return tuple(tensors)
    head = CheckpointTensor(name="lm_head.weight", shape=embedding.shape, dtype=embedding.dtype, tied_to=embedding.name)
    return (*(tensor for tensor in tensors if tensor.name != head.name), head)


def _read_header(file: Path) -> list[CheckpointTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{file} is no safetensors file: {size} bytes, of which the first 8 promise a header of {length}; "
                f"a download may have been cut, or have fetched a pointer instead of the file"
            )
        header = _parse(file, stream.read(length))
    header.pop("__metadata__", None)
    spans = []
    tensors = []
    for name, entry in header.items():
        tensor, span = _read_entry(file, name, entry)
        tensors.append(tensor)
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"{file}: a tensor begins at byte {start}, where the one before it ends at {end}")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"{file}: its header describes {end} bytes of tensors, and {size - 8 - length} follow it")
    return tensors


def _read_entry(file: Path, name: str, entry: Any) -> tuple[CheckpointTensor, tuple[int, int]]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{file}: {name!r} has no dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ValueError(f"{file}: {name!r} has dtype {entry['dtype']!r}; explain knows {', '.join(_DTYPES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{file}: {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{file}: {name!r} of shape {shape} in {dtype} takes {nbytes} bytes, not {offsets!r}")
    return CheckpointTensor(name=name, shape=tuple(shape), dtype=dtype), (offsets[0], offsets[1])


def _read_json(file: Path) -> dict[str, Any]:
    return _parse(file, file.read_bytes())


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(parsed).__name__}")  # noqa: TRY004 - of a file
    return parsed
