"""Files of weights: where they lie, which tensors they hold, and any box of one of them without the rest.

A folder on this machine is read as it is, and the network never asked. Any other name is a model of the Hub: its
configuration and its safetensors files come into the Hub's cache, all of one commit.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.errors import ModelError
from rl_backends.file_names import is_plain_name
from rl_backends.loading.lazy_tensors import LazyTensor

__all__ = ["FileTensor", "local_folder", "model_folder", "open_tensors", "weight_files"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

PIECE_BYTES = 32 * 2**20
"""Most bytes that are read at once, where a row of a tensor is not larger."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Under the names of safetensors. Floats of 8 bits and fewer are absent: their scales lie in other tensors."""


def local_folder(model_name: str) -> Path | None:
    """The folder that `model_name` means, or None where it is an id of the Hub.

    Raises:
        ModelError: it can only be a folder, and there is none, or no `config.json` in it.
    """
    folder = Path(model_name).expanduser()
    if not (model_name.startswith((".", "/", "~")) or folder.exists()):
        return None
    if not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(f"{model_name}: {state}; give a folder that save_pretrained wrote, or an id of the Hub")
    return folder


def model_folder(model_name: str, *, revision: str | None, trust_remote_code: bool) -> Path:
    """The folder with the configuration: the local one, or that of one commit in the Hub's cache.

    Raises:
        ModelError: there is none; the Hub has none, or cannot be reached.
    """
    if (folder := local_folder(model_name)) is not None:
        return folder
    patterns = ["config.json", "generation_config.json", INDEX, *(["*.py"] if trust_remote_code else [])]
    folder = _download(model_name, revision=revision, patterns=patterns)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model_name}: the repository on the Hub has no config.json, so it is not a model")
    return folder


def weight_files(model_name: str, folder: Path) -> list[Path]:
    """The safetensors files of a model, from the Hub where `model_name` is an id.

    folder: what `model_folder` gave.

    Raises:
        ModelError: there are none, one is missing, or the index cannot be read or names files elsewhere.
    """
    names = _indexed(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    if local_folder(model_name) is None:
        folder = _download(model_name, revision=folder.name, patterns=names)
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"{model_name}: no file {', '.join(missing[:3])}; weights are read from safetensors alone, so give the "
            f"whole folder, or convert other formats with transformers' save_pretrained"
        )
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    try:
        names = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}") from error
    if strange := [name for name in names if not is_plain_name(name)]:
        raise ModelError(
            f"{index}: weight_map names {strange[0]!r}, which is no file of its own folder; only files of "
            f"{index.parent} are read"
        )
    return sorted(set(names))


def _download(model_name: str, *, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the Hub's errors are both
        raise ModelError(
            f"{model_name} is not a local folder, and the Hub has no model of this name"
            f"{'' if revision is None else f' at revision {revision}'}: {type(error).__name__}: {error}"
        ) from error


class FileTensor(LazyTensor):
    """One tensor of an open safetensors file."""

    def __init__(self, handle: Any, name: str, *, file: Path) -> None:
        header = handle.get_slice(name)
        if (dtype := DTYPES.get(header.get_dtype())) is None:
            raise ModelError(
                f"{file}: {name} is stored as {header.get_dtype()}; quantized weights cannot be trained, give the "
                f"folder of the model in bfloat16, float16 or float32"
            )
        super().__init__(header.get_shape(), dtype)
        self._handle, self._name = handle, name

    def read_into(self, out: Tensor, offsets: Sequence[int]) -> None:
        """Copy a box, some rows at a time, so that what is read and not yet cast stays small."""
        if not offsets:
            out.copy_(self._handle.get_tensor(self._name))
            return
        row_bytes = max(1, out[:1].numel() * self.dtype.itemsize)
        rows = max(1, PIECE_BYTES // row_bytes)
        inner = tuple(slice(at, at + size) for at, size in zip(offsets[1:], out.shape[1:], strict=True))
        stored = self._handle.get_slice(self._name)
        for first in range(0, out.shape[0], rows):
            piece = out[first : first + rows]
            piece.copy_(stored[(slice(offsets[0] + first, offsets[0] + first + piece.shape[0]), *inner)])


@contextmanager
def open_tensors(files: Sequence[Path]) -> Iterator[dict[str, LazyTensor]]:
    """Every tensor of safetensors files under its name there, to be read until the end of the context.

    Raises:
        ModelError: a file is damaged, or holds a dtype that cannot be trained.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, LazyTensor] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {type(error).__name__}: {error}; fetch it again") from error
            found |= {name: FileTensor(handle, name, file=file) for name in handle.keys()}  # noqa: SIM118 - no mapping
        yield found
