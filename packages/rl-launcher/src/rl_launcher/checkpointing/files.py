"""Files that are on disk when the call returns, and a folder that appears whole or not at all. Knows no training."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["appearing", "digest_of", "sync", "unfinished_name", "write_text"]


def unfinished_name(folder: Path) -> str:
    """Under which a folder is written, beside its target."""
    return f".{folder.name}.unfinished"


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write in that takes the name `folder` when the block ends well, and is removed when it does not.

    What is there under that name goes when the new one is whole. A kill leaves the unfinished name or the whole folder.
    """
    unfinished = folder.with_name(unfinished_name(folder))
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.mkdir()
        yield unfinished
        _sync_tree(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of what is there."""
    unfinished = path.with_name(unfinished_name(path))
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)
