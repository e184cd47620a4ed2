"""Folders and files that appear complete or not at all: written under another name, flushed to disk, renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_backends.export.files import sync


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `folder` if the block succeeds and removed if it fails.

    An existing `folder` is replaced only when the new one is complete. A kill leaves either the unfinished folder or
    the complete one.

    Raises:
        NotADirectoryError: a file stands where the parent of `folder` is to be.
    """
    unfinished = folder.with_name(unfinished_name(folder))
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # which a caller would take for `folder` being there
        raise NotADirectoryError(f"{folder.parent} is a file, so {folder} cannot be a folder in it") from error
    try:
        unfinished.mkdir()
        yield unfinished
        sync_tree(unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
        sync([folder.parent])
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def unfinished_name(folder: Path) -> str:
    """Return the name under which a file or folder is written, beside its own."""
    return f".{folder.name}.unfinished"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing what is there."""
    unfinished = path.with_name(unfinished_name(path))
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync([path.parent])


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on disk."""
    sync([*sorted(folder.rglob("*"), reverse=True), folder])
