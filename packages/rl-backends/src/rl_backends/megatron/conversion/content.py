"""What a model's files hold, as a key that changes when they do, and how large they are as tensors.

Reads headers and samples, never all weights: 140 GB are known in a second. A file of the Hub's cache is known by the
name of its blob, which is its digest. Any other is known by its header, its size, when it was last written, and blocks
spread over it; to write it anew, even unchanged, gives another key. Imports no Megatron.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backends.errors import ModelError
from rl_backends.loading import ModelSource
from rl_backends.loading.source import local_folder, weight_files
from rl_backends.megatron.conversion.digests import sampled_digest

__all__ = ["LAYOUT", "SourceContent", "source_content"]

LAYOUT = 1
"""Of the tensors in a conversion; a release that lays them out otherwise counts on, and converts anew."""
MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself has it; a longer one is cut off, and so is no JSON."""
BLOB = re.compile(r"[0-9a-f]{64}")
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContent:
    """Files of a model, without their numbers."""

    model_name: str
    """An id of the Hub, or the folder's whole path."""
    revision: str | None
    """The Hub's commit; None for a folder."""
    key: str
    """64 hexadecimal digits."""
    numbers: int
    """How many numbers all tensors have."""
    files: int
    """How many files of weights."""
    source_dtype: str
    """Of the tensors in the files; `float32` where they differ."""

    @property
    def dtype(self) -> str:
        """Of the conversion: the files' own where that is bfloat16, else float32, which holds float16 exactly."""
        return "bfloat16" if self.source_dtype == "bfloat16" else "float32"

    @property
    def tensor_bytes(self) -> int:
        """Of all tensors in that dtype."""
        return self.numbers * BITS["BF16" if self.dtype == "bfloat16" else "F32"] // 8

    @property
    def name(self) -> str:
        """Of the conversion's folder: model, commit, content."""
        plain = self.model_name if self.revision else Path(self.model_name).name
        safe = re.sub(r"[^A-Za-z0-9._]+", "-", plain.replace("/", "--")).strip("-._")[:80] or "model"
        return f"{safe}-{self.revision[:8] if self.revision else 'local'}-{self.key[:16]}"


def source_content(source: ModelSource) -> SourceContent:
    """Look at the files of a model; those of the Hub are fetched if they are not here.

    Raises:
        ModelError: there are none, or one is damaged.
        OSError: one cannot be read.
    """
    folder = local_folder(source.model_name)
    files = weight_files(source.model_name, source.folder)
    headers = [_header(file) for file in files]
    told = {
        "layout": LAYOUT,
        "head": source.head,
        "config": hashlib.sha256((source.folder / "config.json").read_bytes()).hexdigest(),
        "files": {file.name: _identity(file, header) for file, (header, _) in zip(files, headers, strict=True)},
    }
    tensors = [tensor for _, found in headers for tensor in found]
    return SourceContent(
        model_name=source.model_name if folder is None else str(folder.resolve()),
        revision=source.folder.name if folder is None else None,
        key=hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest(),
        numbers=sum(_numel(tensor["shape"]) for tensor in tensors),
        files=len(files),
        source_dtype=_common_dtype([tensor["dtype"] for tensor in tensors]),
    )


def _identity(file: Path, header: bytes) -> list[Any]:
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and BLOB.fullmatch(blob.name):
        return ["blob", blob.name]
    about = file.stat()
    return ["file", about.st_size, about.st_mtime_ns, hashlib.sha256(header).hexdigest(), sampled_digest(file)]


def _header(file: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The header of a safetensors file as it is, and the tensors that it names."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = opened.read(min(size, MAX_HEADER_BYTES))
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        for tensor in tensors:
            _numel(tensor["shape"]), str(tensor["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} is no safetensors file: {type(error).__name__}: {error}; fetch it again") from error
    return header, tensors


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _common_dtype(dtypes: Sequence[str]) -> str:
    floats = {dtype for dtype in dtypes if dtype in BITS}
    return NAMES.get(floats.pop(), "float32") if len(floats) == 1 else "float32"
