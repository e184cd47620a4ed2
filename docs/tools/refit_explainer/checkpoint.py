"""Names, shapes and dtypes of a Hugging Face folder's weights, from the headers of its safetensors files alone.

A file begins with the length of its header, 8 bytes little-endian, and the header, JSON of `{name: {"dtype", "shape",
"data_offsets"}}` with offsets from the header's end. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_refit.errors import RefitError
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta

__all__ = ["Checkpoint", "read_checkpoint"]

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
class Checkpoint:
    """What `explain` needs to know of a model."""

    manifest: Manifest
    """Its tensors; whole, unless it was a saved manifest that says how they lie."""

    num_kv_heads: int | None = None
    """Key and value heads, from config.json; None where it does not say."""

    saved: bool = False
    """Whether it was a saved manifest."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a Hugging Face folder with safetensors files, or a manifest that `Manifest.to_json` wrote.

    The head of a model without `lm_head.weight` is taken to be tied to its embedding, unless config.json denies it.

    Raises:
        FileNotFoundError: There is nothing to read at `path`, or the index names a file that is missing.
        ValueError: A file is not what it should be; says which, and what is wrong with it.
    """
    if path.is_file():
        try:
            return Checkpoint(manifest=Manifest.from_json(path.read_text()), saved=True)
        except (RefitError, UnicodeDecodeError) as error:
            remedy = "give a folder of safetensors files or what Manifest.to_json wrote"
            raise ValueError(f"{path}: {error}; {remedy}") from error
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder of safetensors files nor a saved manifest")

    index = path / _INDEX
    weight_map: Any = {}
    if index.is_file():
        weight_map = _parse(index, index.read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index} has no weight_map of names to files")
        files = [path / name for name in sorted(set(weight_map.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise FileNotFoundError(
                f"{path} misses {len(missing)} of {len(files)} files of its index, {', '.join(missing[:3])} among "
                f"them; shapes stand in the files, so download them"
            )
    else:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{path} has neither {_INDEX} nor any *.safetensors file")

    tensors: dict[str, TensorMeta] = {}
    homes: dict[str, str] = {}
    for file in files:
        for meta in _read_header(file):
            if meta.name in tensors:
                raise ValueError(f"{path}: more than one file has {meta.name}; keep one set of files in the folder")
            tensors[meta.name], homes[meta.name] = meta, file.name
    if lost := [name for name, file_name in weight_map.items() if homes.get(name) != file_name]:
        raise ValueError(f"{path}: {weight_map[lost[0]]} does not hold {lost[0]}, which the index places there")

    config_file = path / "config.json"
    config = _parse(config_file, config_file.read_bytes()) if config_file.is_file() else {}
    text_config = config.get("text_config", config)
    text_config = text_config if isinstance(text_config, dict) else {}
    says = config.get("tie_word_embeddings", text_config.get("tie_word_embeddings"))
    embedding = next((meta for name, meta in tensors.items() if name.endswith("embed_tokens.weight")), None)
    head = tensors.get("lm_head.weight")
    if embedding is not None and (says or (says is None and head is None)):
        tensors.pop("lm_head.weight", None)
        tensors["lm_head.weight"] = replace(embedding, name="lm_head.weight", tied_to=embedding.name)
    num_kv_heads = text_config.get("num_key_value_heads")
    return Checkpoint(
        manifest=Manifest(tuple(tensors.values())),
        num_kv_heads=num_kv_heads if isinstance(num_kv_heads, int) else None,
    )


def _read_header(file: Path) -> list[TensorMeta]:
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
    tensors: list[TensorMeta] = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
                code in _DTYPES and all(type(n) is int and n >= 0 for n in shape)
            ):
                nbytes = math.prod(shape) * getattr(torch, _DTYPES[code]).itemsize
            case _:
                known = ", ".join(_DTYPES)
                raise ValueError(f"{file}: {name!r} is {entry!r}, and not a shape, data_offsets and a dtype of {known}")
        if stop - start != nbytes:
            raise ValueError(f"{file}: {name!r} of shape {shape} in {code} takes {nbytes} bytes, not {[start, stop]}")
        tensors.append(TensorMeta(name=name, shape=tuple(shape), dtype=_DTYPES[code], layout=Layout.whole()))
    promised = sum(meta.total_bytes for meta in tensors)
    if promised != size - 8 - length:
        raise ValueError(f"{file}: its header describes {promised} bytes of tensors, and {size - 8 - length} follow it")
    return tensors


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(parsed).__name__}")  # noqa: TRY004 - of a file
    return parsed
