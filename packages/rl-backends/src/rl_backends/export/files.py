"""Safetensors files that are written as they fill: names and sizes are planned, then each is held once.

Knows names, sizes and bytes; no model.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from rl_backends.errors import ModelError

__all__ = ["ShardFiles", "sync"]


class ShardFiles:
    """The files of a model in one folder.

    Args:
        folder: where they go; it exists and is empty.
        outputs: every tensor that will be added, as meta tensors, in the order in which it will be,
            more or less: a file is held from its first tensor to its last.
        max_shard_bytes: of one file, where a single tensor is not larger.
    """

    def __init__(self, folder: Path, outputs: Mapping[str, Tensor], *, max_shard_bytes: int) -> None:
        self._folder = folder
        self._total_size = sum(tensor.nbytes for tensor in outputs.values())
        self._file_of = _assign(outputs, max_shard_bytes)
        self._absent: dict[str, set[str]] = {}
        for name, file in self._file_of.items():
            self._absent.setdefault(file, set()).add(name)
        self._held: dict[str, dict[str, Tensor]] = {file: {} for file in self._absent}

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; write the file that it is the last of.

        Raises:
            OSError: the disk is full or read-only.
        """
        file = self._file_of[name]
        self._held[file][name] = _alone(tensor)
        self._absent[file].remove(name)
        if not self._absent[file]:
            self._write(file)

    def finish(self) -> None:
        """Write the index where there are several files.

        Raises:
            ModelError: tensors that were to be added were not.
            OSError: the disk is full or read-only.
        """
        if absent := sorted(set().union(*self._absent.values())):
            raise ModelError(f"{len(absent)} tensors were not given to be written, the first is {absent[0]}")
        if len(self._absent) > 1:
            index = {"metadata": {"total_size": self._total_size}, "weight_map": self._file_of}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _write(self, file: str) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._held.pop(file), self._folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # its own name for what the operating system says
            raise OSError(f"{self._folder / file} cannot be written: {error}") from error


def sync(paths: Iterable[Path]) -> None:
    """Wait until files and folders are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _assign(outputs: Mapping[str, Tensor], max_shard_bytes: int) -> dict[str, str]:
    number_of: dict[str, int] = {}
    number = size = 0
    for name, tensor in outputs.items():
        if size and size + tensor.nbytes > max_shard_bytes:
            number, size = number + 1, 0
        size += tensor.nbytes
        number_of[name] = number
    if not number:
        return dict.fromkeys(number_of, "model.safetensors")
    return {name: f"model-{at + 1:05}-of-{number + 1:05}.safetensors" for name, at in number_of.items()}


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory that is its own: safetensors refuses views, and a view keeps all of what it is a part of."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.contiguous().clone()
