"""Folders and files that are complete or absent, folders that prove it by a marker, and folders that all ranks see."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rl_backends.checkpoints.manifest import digest_of, sync, text_digest
from rl_backends.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `folder` if the block succeeds and removed if it fails.

    An existing `folder` is replaced only when the new one is complete. A kill leaves either the unfinished folder or
    the complete one.

    Raises:
        NotADirectoryError: the parent of `folder` is a file.
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


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it is on disk."""
    sync([*sorted(folder.rglob("*"), reverse=True), folder])


def unfinished_name(folder: Path) -> str:
    """The name under which a file or folder is written, beside its target."""
    return f".{folder.name}.unfinished"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing what is there."""
    unfinished = path.with_name(unfinished_name(path))
    unfinished.write_text(text, encoding="utf-8")
    sync([unfinished])
    unfinished.replace(path)
    sync([path.parent])


# ---- A marker: size and digest of the other files, and a digest of its own text.


def write_marker(marker: Path, about: Mapping[str, Any], *, format: tuple[str, int], files: Iterable[Path]) -> None:  # noqa: A002
    """Write the marker of a folder whose other files are written.

    Args:
        marker: the new file, in that folder.
        about: further content, as JSON.
        format: name and version of the folder's layout.
        files: those in the folder that the marker vouches for.
    """
    paths = list(files)
    digests = zip(paths, in_threads(digest_of, paths), strict=True)
    sizes = {path.relative_to(marker.parent).as_posix(): [path.stat().st_size, digest] for path, digest in digests}
    body = {"format": format[0], "format_version": format[1], **about, "files": sizes}
    marker.write_text(json.dumps({**body, "sha256": text_digest(body)}), encoding="utf-8")


def read_marker(marker: Path, *, format: tuple[str, int], remedy: str, check: bool = True) -> dict[str, Any]:  # noqa: A002
    """Read a marker, and compare the files with their digests, unless `check` is False.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or of another format; the message ends with `remedy`.
    """
    if not marker.is_file():
        raise CheckpointError(
            f"{marker.parent} is incomplete: it has no {marker.name}, which is written last; {remedy}"
        )
    try:
        body: dict[str, Any] = json.loads(marker.read_text(encoding="utf-8"))
        digest, written, listed = body.pop("sha256"), (body["format"], body["format_version"]), body["files"]
        sound = digest == text_digest(body)
        body["files"] = files = {
            name: (int(num_bytes), str(file_digest)) for name, (num_bytes, file_digest) in listed.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged: {error}; {remedy}") from error
    if not sound:
        raise CheckpointError(f"{marker} is damaged: its digest does not match its text; {remedy}")
    if written != format:
        raise CheckpointError(
            f"{marker} has format {written[0]} {written[1]}, and this release reads {format[0]} {format[1]}: use the "
            f"release that wrote it"
        )
    if strange := [name for name in files if {"..", "/"} & set(PurePosixPath(name).parts)]:
        raise CheckpointError(f"{marker} names {strange[0]!r}, which does not lie in its folder; {remedy}")

    def is_whole(name: str) -> bool:
        path, (num_bytes, file_digest) = marker.parent / name, files[name]
        return path.is_file() and path.stat().st_size == num_bytes and digest_of(path) == file_digest

    for name, whole in zip(files, in_threads(is_whole, files) if check else (), strict=check):
        if not whole:
            raise CheckpointError(f"{marker.parent / name} is not what was written: missing or damaged; {remedy}")
    return body


def in_threads(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `action`, in threads: hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(action, items))


# ---- A file that shows which ranks see the same folder.


@contextmanager
def probe_file(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the content of a file in `folder`, which is removed after the block.

    All ranks write their shards into one checkpoint, so without a common folder no node would have a complete one.

        with probe_file(folder) as (path, token):
            require_shared(folder, {"rank 1 on node b": call_rank_1(sees, path, token)})
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)  # a file of the same name on another disk has another content
    path = folder / f".shared-{token[:8]}"
    path.write_text(token, encoding="utf-8")
    try:
        yield str(path), token
    finally:
        path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def sees(path: str, token: str) -> bool:
    """Return whether the calling process can read that file; to be called on every rank."""
    try:
        return Path(path).read_text(encoding="utf-8") == token
    except OSError:  # absent or unreadable
        return False


def require_shared(folder: Path, seen: Mapping[str, bool]) -> None:
    """Refuse a folder that not every rank sees; `seen` has the result of `sees` by rank.

    Raises:
        ValueError: with the ranks that do not see it, and the remedy.
    """
    if blind := [rank for rank, sees_it in seen.items() if not sees_it]:
        raise ValueError(
            f"{folder.absolute()} is not the same folder for {', '.join(blind)}: all ranks write checkpoints, and read "
            f"them when the run is resumed; choose a folder that every node mounts at the same path (in a recipe, "
            f"run_dir)"
        )
