"""A file that appears under its name only when every byte of it is on the disk.

Written as `<name>.partial`; flushed, then renamed, by `publish`. Whatever fails, the partial file goes, unless the
process is killed; then it is overwritten by the next one to write that file.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import final

from torch import Tensor

from rl_refit.digest import as_bytes
from rl_refit.errors import RefitError
from rl_refit.transports.base import Watch

__all__ = ["FileWriter", "require_space"]

_CHUNK_BYTES = 16 * 2**20  # written between two looks at the watch


@final
class FileWriter:
    """Writes `path`; a context manager, at whose end what was not published is gone.

    Args:
        path: The file's name, when it is whole.
        watch: Looked at between chunks.

    Raises:
        RefitError: The disk is full, or refuses otherwise; names the file.
    """

    def __init__(self, path: Path, watch: Watch) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._watch = watch
        self._file: FileIO

    def __enter__(self) -> FileWriter:
        with self._explaining():
            self._file = self._partial.open("wb", buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def seek(self, place: int) -> None:
        """Go on at byte `place`."""
        with self._explaining():
            self._file.seek(place)

    def write(self, data: bytes | Tensor) -> None:
        """Write bytes, or those of a tensor of any dtype, strides and device."""
        held = data if isinstance(data, bytes) else data.detach().cpu().contiguous()
        view = memoryview(held if isinstance(held, bytes) else _memory(held))
        while view:
            self._watch.check()
            with self._explaining():
                view = view[self._file.write(view[:_CHUNK_BYTES]) :]

    def publish(self) -> None:
        """Have the disk keep what was written, then give it its name."""
        with self._explaining():
            os.fsync(self._file.fileno())
            self._partial.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RefitError(f"cannot write {self._partial}: {error.strerror or error}") from error


def require_space(directory: Path, nbytes: int) -> None:
    """Pass if the disk of `directory` has room for `nbytes`.

    Raises:
        RefitError: It has not; says how much it has.
    """
    available = shutil.disk_usage(directory).free
    if nbytes > available:
        raise RefitError(
            f"{directory} has {available:,} bytes available, and {nbytes:,} are needed; "
            f"free some, keep fewer versions, or write elsewhere"
        )


def _memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous tensor on the CPU; valid as long as the tensor is held."""
    flat = as_bytes(tensor)
    return (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
