"""Files of one JSON object per line: a killed writer loses no complete line, and a torn line costs only itself."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from rl_observe.run_directory import RunDirectoryError, describe

JsonValue: TypeAlias = "str | float | bool | list[JsonValue] | dict[str, JsonValue] | None"
"""A value that JSON can hold."""


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The readable part of a file."""

    rows: list[dict[str, JsonValue]]
    """The objects, in the file's order."""

    unreadable: int
    """Lines that are not a JSON object, such as the last line of a run that was killed while writing it."""


class Closing:
    """A context manager that calls `close` on exit."""

    def close(self) -> None:
        """Release what is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLinesWriter(Closing):
    """Append rows to a file, from any thread. When `append` returns, the operating system has the line.

    Raises:
        RunDirectoryError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)
            # Start a new line after a torn one; appended to it, the next object would be torn as well.
            if self._file.tell():
                with path.open("rb") as file:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":
                        self._file.write(b"\n")
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be opened for writing: {describe(error)}") from error

    def append(self, row: Mapping[str, object]) -> None:
        """Write one object as one line; a number that is not finite becomes null.

        Raises:
            RunDirectoryError: the disk refused the line; the lines before it are complete.
        """
        data = (json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            with self._lock:
                while data:  # an unbuffered write may write less than it was given
                    data = data[self._file.write(data) :]
        except OSError as error:
            raise RunDirectoryError(
                f"{self._path} cannot be written: {describe(error)}; all earlier lines are complete"
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


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


def read_rows(path: Path) -> list[dict[str, JsonValue]]:
    """Read the objects of a file that may not exist yet; lines that cannot be parsed are skipped."""
    return read_json_lines(path).rows if path.exists() else []


def finite_number(value: object) -> float | None:
    """Return `value` if it is a number of magnitude up to 1e300 (beyond that, sums overflow), else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= 10**300 else None


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
