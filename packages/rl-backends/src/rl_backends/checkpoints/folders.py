"""Files that are on disk, folders that are complete or absent and prove it by a marker, folders that all ranks see."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from torch import Tensor

from rl_backends.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")


# ---- Files that are on disk when the call returns.


def write_safetensors(path: Path, tensors: dict[str, Tensor], *, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors into a new file, from their own memory without a copy; wait until it is on disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:  # its own name for an error of the operating system
        raise OSError(f"{path} cannot be written: {error}") from error
    sync([path])


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON into a new file and wait until it is on disk."""
    with path.open("xb") as file:
        file.write(json.dumps(value).encode())
    sync([path])


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, replacing what is there."""
    unfinished = path.with_name(unfinished_name(path))
    unfinished.write_text(text, encoding="utf-8")
    sync([unfinished])
    unfinished.replace(path)
    sync([path.parent])


def sync(paths: Iterable[Path]) -> None:
    """Wait until files, and the names in folders, are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, read as a stream."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_digest(body: Mapping[str, Any]) -> str:
    """The SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---- Folders that are complete or absent.


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = True) -> Iterator[Path]:
    """Yield a folder to write to, which is renamed to `folder` if the block succeeds and removed if it fails.

    An existing `folder` is replaced only when the new one is complete, or not at all. A kill leaves either the
    unfinished folder or the complete one.

    Raises:
        FileExistsError: `folder` exists, before the block or after it, and may not be replaced.
        NotADirectoryError: the parent of `folder` is a file.
    """

    def refuse_existing() -> None:
        if not replace and folder.exists():
            raise FileExistsError(f"{folder} exists already; it is never overwritten, choose another folder")

    refuse_existing()
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
        refuse_existing()
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


# ---- A marker: size and digest of the other files, and a digest of its own text.

Record = tuple[int, str]
"""Bytes and SHA-256 of a file that was written."""


def record_of(path: Path) -> Record:
    """Of a file; the digest is read from the file, so that it is that of what a reader gets."""
    return path.stat().st_size, digest_of(path)


def records_of(folder: Path, files: Sequence[Path]) -> dict[str, Record]:
    """Of each file in a folder, by its path there."""
    names = [path.relative_to(folder).as_posix() for path in files]
    return dict(zip(names, in_threads(record_of, files), strict=True))


def check_file(path: Path, record: Record, *, remedy: str, digest: bool = True) -> None:
    """Refuse a file that is not what was written; without `digest` its size alone is looked at."""
    num_bytes, sha256 = record
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, though its folder was complete; {remedy}")
    if (size := path.stat().st_size) != num_bytes:
        kind = "truncated" if size < num_bytes else "longer than what was written"
        raise CheckpointError(f"{path}: {size} bytes, and {num_bytes} were written: {kind}; {remedy}")
    try:
        found = digest_of(path) if digest else sha256
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; {remedy}") from error
    if found != sha256:
        raise CheckpointError(
            f"{path}: damaged: its SHA-256 is {found[:16]}..., and that of what was written {sha256[:16]}...; {remedy}"
        )


def write_marker(
    marker: Path,
    about: Mapping[str, Any],
    *,
    format: tuple[str, int],  # noqa: A002
    files: Mapping[str, Record],
) -> None:
    """Write the marker of a folder whose other `files` are written; it is on disk when the call returns.

    about: further content, as JSON; format: name and version of the folder's layout.
    """
    body = {"format": format[0], "format_version": format[1], **about, "files": files}
    write_json(marker, {**body, "sha256": text_digest(body)})


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
        digest, written = body.pop("sha256"), (body["format"], body["format_version"])
        sound = digest == text_digest(body)
        body["files"] = {name: (int(size), str(sha256)) for name, (size, sha256) in body["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{marker} is damaged: {type(error).__name__}: {error}; {remedy}") from error
    if written != format:
        raise CheckpointError(
            f"{marker} has format {written[0]} {written[1]}, and this release reads {format[0]} {format[1]}: use the "
            f"release that wrote it"
        )
    if not sound:
        raise CheckpointError(f"{marker} is damaged: its digest does not match its text; {remedy}")
    if strange := [name for name in body["files"] if {"..", "/"} & set(PurePosixPath(name).parts)]:
        raise CheckpointError(f"{marker} names {strange[0]!r}, which does not lie in its folder; {remedy}")
    if check:
        in_threads(lambda file: check_file(marker.parent / file[0], file[1], remedy=remedy), body["files"].items())
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
