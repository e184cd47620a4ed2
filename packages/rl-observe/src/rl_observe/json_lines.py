"""Files of one JSON object a line: appended so that a killed process loses nothing, read so that a torn line costs one.

It does not know what the objects mean.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from rl_observe.run_directory import RunDirectoryError, describe

__all__ = ["JsonLines", "JsonLinesWriter", "JsonValue", "finite_number", "read_json_lines"]

JsonValue: TypeAlias = "str | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
"""What a JSON object may hold."""


_LARGEST = 10**300


@dataclass(frozen=True, slots=True)
class JsonLines:
    """What could be read of a file."""

    rows: list[dict[str, JsonValue]]
    """The objects, in the file's order."""

    unreadable: int
    """Lines that are not a JSON object, such as the last one of a run that was killed while it wrote."""


class JsonLinesWriter:
    """Append to a file, from any thread; a line that `append` returned from is with the operating system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)
            # After a torn line the next object would be torn as well.
            if self._file.tell() and _last_byte(path) != b"\n":
                self._file.write(b"\n")
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be opened for writing: {describe(error)}") from error

    def append(self, row: Mapping[str, object]) -> None:
        """Write one object as one line; a number that is not finite becomes null, which JSON can hold.

        Raises:
            RunDirectoryError: the disk refused the line; the lines before it are whole.
        """
        line = json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            with self._lock:
                self._write_all(line.encode())
        except OSError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be written: {describe(error)}; every earlier line is whole"
            ) from error

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]


def read_json_lines(path: Path) -> JsonLines:
    """Read every line that is a JSON object, and count those that are not.

    Raises:
        OSError: the file cannot be read.
    """
    rows: list[dict[str, JsonValue]] = []
    unreadable = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                unreadable += 1
    return JsonLines(rows, unreadable)


def finite_number(value: object) -> float | None:
    """The number that `value` is, or None if it is something else, not finite, or beyond 1e300, where sums overflow."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= _LARGEST else None


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1)
