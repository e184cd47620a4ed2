"""Where bytes go that leave a device: host memory that is used again, or files in a folder of this process alone.

A store keeps one sequence of bytes at a time, given and taken as contiguous uint8 tensors of one dim on any device;
`put` copies and changes nothing at the source.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

# A power of two, since torch rounds pinned memory up to one; what is packed into such chunks wastes one at most.
CHUNK_BYTES = 64 * 2**20
FILE_BYTES = 256 * 2**20


class HostStore:
    """Chunks of host memory that are kept for the next time."""

    def __init__(self, *, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def host_bytes(self) -> int:
        """Of all chunks."""
        return len(self._chunks) * self._chunk_bytes

    def put(self, pieces: Sequence[Tensor]) -> None:
        """Copy `pieces` one after the other into the chunks, of which there will be as many as it takes."""
        while self.host_bytes < sum(piece.numel() for piece in pieces):
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
        for part, place in self._places(pieces):
            place.copy_(part, non_blocking=self._pinned)

    def get(self, into: Sequence[Tensor]) -> None:
        """Copy back."""
        for part, place in self._places(into):
            part.copy_(place, non_blocking=self._pinned)

    def clear(self) -> None:
        """Nothing: the next bytes overwrite these."""

    def close(self) -> None:
        """Give the memory back."""
        self._chunks.clear()

    def _places(self, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of a piece that lies in one chunk, and where."""
        at = 0
        for piece in pieces:
            done = 0
            while done < piece.numel():
                chunk, offset = divmod(at, self._chunk_bytes)
                size = min(piece.numel() - done, self._chunk_bytes - offset)
                yield piece[done : done + size], self._chunks[chunk][offset : offset + size]
                done, at = done + size, at + size


class DiskStore:
    """safetensors files in a new folder that only this user can read, deleted by `clear`, `close` or the process's end.

    A process that is killed leaves the folder: its name begins with `rl-backends-offload-`.

    Args:
        directory: where the folder is made; on a disk, since files in a file system of memory free none.
        file_bytes: about how much of it is in one file, hence in host memory at a time while it is written.
    """

    def __init__(self, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
        self._directory = directory
        self._file_bytes = file_bytes
        self._delete: weakref.finalize[[str], DiskStore] | None = None
        self._files: list[tuple[Path, int]] = []

    @property
    def host_bytes(self) -> int:
        """None: files are no memory."""
        return 0

    def put(self, pieces: Sequence[Tensor]) -> None:
        """Write `pieces`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        folder = Path(tempfile.mkdtemp(prefix="rl-backends-offload-", dir=self._directory))
        self._delete = weakref.finalize(self, shutil.rmtree, str(folder), ignore_errors=True)
        for number, group in enumerate(self._groups(pieces)):
            path = folder / f"{number}.safetensors"
            try:
                save_file({str(index): piece.cpu() for index, piece in enumerate(group)}, path)
            except SafetensorError as error:  # what it makes of an error of the disk
                raise OSError(f"{path} could not be written: {error}") from error
            self._files.append((path, len(group)))

    def get(self, into: Sequence[Tensor]) -> None:
        """Read them back."""
        from safetensors import SafetensorError, safe_open

        pieces = iter(into)
        for path, number in self._files:
            try:
                with safe_open(path, framework="pt") as file:
                    for index in range(number):
                        next(pieces).copy_(file.get_tensor(str(index)))
            except SafetensorError as error:
                raise RuntimeError(f"{path} is not what was written to it: {error}") from error

    def clear(self) -> None:
        """Delete the folder."""
        if self._delete is not None:
            self._delete()
        self._delete, self._files = None, []

    def close(self) -> None:
        """Delete the folder."""
        self.clear()

    def _groups(self, pieces: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        group: list[Tensor] = []
        for piece in pieces:
            if group and sum(each.numel() for each in group) + piece.numel() > self._file_bytes:
                yield group
                group = []
            group.append(piece)
        if group:
            yield group
