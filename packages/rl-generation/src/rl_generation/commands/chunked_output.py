"""A JSON Lines file that grows by whole chunks of prompts, and says how far it got.

The lines of a chunk are written at once and synced before the next chunk is begun. A crash can tear the last chunk
only; it is cut off, and made again whole, so that its batches hold what they would have held.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, final

from rl_generation.commands.console import CommandError
from rl_generation.commands.run_record import record_path, sync_folder

__all__ = ["ChunkedOutput", "Progress", "open_output"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an output file got."""

    prompts: int
    """Whose chunks are whole."""

    answers: int
    """To these."""

    length_bytes: int
    """Of their lines."""

    torn_lines: int
    """Of a chunk that is not whole, and will be made again."""

    finished: Counter[str]
    """Finish reason → answers."""


NOTHING = Progress(prompts=0, answers=0, length_bytes=0, torn_lines=0, finished=Counter())


@final
class ChunkedOutput:
    """An open output file, which no other process writes."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file = file
        self.progress = progress

    def begin(self) -> None:
        """Empty the file, and take away the record beside it.

        Raises:
            CommandError: They cannot be changed.
        """
        try:
            record_path(Path(self._file.name)).unlink(missing_ok=True)
            self._file.truncate(0)
        except OSError as error:
            raise CommandError(f"{self._file.name} cannot be emptied: {error.strerror}") from None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of the next chunk; once this returns, a power failure does not lose them.

        Raises:
            CommandError: They cannot be written, as where the disk is full; a resumed run makes the chunk again.
        """
        try:
            self._file.write(b"".join(_line(row) for row in rows))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CommandError(f"{self._file.name} cannot be written: {error.strerror}; --resume goes on") from None


@contextlib.contextmanager
def open_output(
    path: Path, answers: Sequence[int], *, chunk_prompts: int, begin_again: bool = False
) -> Iterator[ChunkedOutput]:
    """Open `path` for appending, cut off after its last whole chunk; make it where it does not exist.

    Args:
        path: The file.
        answers: How many lines each prompt gets.
        chunk_prompts: Prompts of a chunk.
        begin_again: Counts nothing of what the file holds; `begin` then empties it.

    Raises:
        CommandError: Another process writes it, it cannot be written, or it holds what this run did not write.
    """
    try:
        file = path.open("a+b")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        _lock(file, path)
        if begin_again:
            progress = NOTHING
        else:
            progress = _scan(file, path, answers=answers, chunk_prompts=chunk_prompts)
            file.truncate(progress.length_bytes)
            file.seek(0, os.SEEK_END)
        sync_folder(path.parent)
        try:
            yield ChunkedOutput(file, progress)
        finally:
            if not path.stat().st_size:
                path.unlink()  # nothing was made: it shall not stand in the way of another run


def _lock(file: IO[bytes], path: Path) -> None:
    """Hold the file until it is closed, or its process ends in whatever way."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(f"{path} is being written by another run of this command") from None


def _scan(file: IO[bytes], path: Path, *, answers: Sequence[int], chunk_prompts: int) -> Progress:
    """Read the lines that should be there, until the file ends or says something else."""
    file.seek(0)
    whole = NOTHING
    for start in range(0, len(answers), chunk_prompts):
        end = min(start + chunk_prompts, len(answers))
        expected = [(index, sample) for index in range(start, end) for sample in range(answers[index])]
        lines = list(_take(file, len(expected)))
        read = [_row(line, place) for line, place in zip(lines, expected, strict=False)]
        if len(lines) < len(expected) or None in read:
            _refuse_what_follows(file, path, whole)
            return replace(whole, torn_lines=len(lines))
        whole = Progress(
            prompts=end,
            answers=whole.answers + len(expected),
            length_bytes=file.tell(),
            torn_lines=0,
            finished=whole.finished + Counter(row["finish_reason"] for row in read if row is not None),
        )
    _refuse_what_follows(file, path, whole)
    return whole


def _take(file: IO[bytes], count: int) -> Iterator[bytes]:
    for _ in range(count):
        line = file.readline()
        if not line:
            return
        yield line


def _row(line: bytes, place: tuple[int, int]) -> dict[str, Any] | None:
    """Parse a line; None where it is torn, or not the one that belongs at `place`."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(row, dict) or (row.get("index"), row.get("sample_index")) != place:
        return None
    return row if "finish_reason" in row else None


def _refuse_what_follows(file: IO[bytes], path: Path, whole: Progress) -> None:
    if file.read(1):
        raise CommandError(
            f"{path} holds what this run did not write, after the {whole.answers} answers of its first "
            f"{whole.prompts} prompts; write to another file, or begin again with --overwrite"
        )


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
