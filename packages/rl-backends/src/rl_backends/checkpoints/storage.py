"""Storage of torch's Distributed Checkpoint as safetensors and JSON: one data file a rank, an index, a marker.

    <folder>/rank-00000-of-00002.safetensors    boxes: key `<piece>@<offset>,<offset>`
    <folder>/tensors.json                       dtype, shape and boxes of each piece, and the file of each box
    <folder>/state.json                         what is no tensor
    <folder>/checkpoint.json                    the marker; see manifest.py

torch's own storages keep their index in a pickle. Everything is written in a folder beside the target, which takes the
target's name by one rename, after torch has told rank 0 that every rank has written.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rl_backends.checkpoints.files import (
    FileRecord,
    TensorEntry,
    sync_folder,
    write_json,
    write_safetensors,
)
from rl_backends.checkpoints.manifest import INDEX, STATE, Manifest, write_manifest
from rl_backends.checkpoints.pieces import dtype_name
from rl_backends.errors import CheckpointError
from rl_backends.file_names import is_plain_name

__all__ = ["CheckpointReader", "CheckpointWriter", "Contents", "metadata_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What goes into a checkpoint besides tensors."""

    version: int
    mesh: dict[str, Any]
    model: dict[str, list[Any]]
    weights: bool
    state: dict[str, Any]
    """What `state.json` is to hold."""


class CheckpointWriter(StorageWriter):
    """Writes each rank's boxes into `unfinished`, which exists, and makes it `target` when all have."""

    def __init__(self, unfinished: Path, target: Path, contents: Contents) -> None:
        self._unfinished, self._target, self._contents = unfinished, target, contents

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer writes one checkpoint, whose name it has."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """The folder was made before."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file."""
        return [
            replace(plan, storage_data=f"rank-{rank:05}-of-{len(plans):05}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, if it has anything to write."""
        results: list[WriteResult] = []
        if plan.items:
            entries = [_entry(item, planner) for item in plan.items]
            record = write_safetensors(self._unfinished / plan.storage_data, entries)
            results = [
                WriteResult(index=item.index, size_in_bytes=entry.num_bytes, storage_data=record)
                for item, entry in zip(plan.items, entries, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: index, state and marker, then the name."""
        written = [result for each in results for result in each]
        files = {result.storage_data.name: result.storage_data for result in written}
        for name, value in ((INDEX, _index(metadata, written)), (STATE, self._contents.state)):
            files[name] = write_json(self._unfinished / name, value)
        write_manifest(self._unfinished, self._manifest(tuple(files.values())))
        sync_folder(self._unfinished)
        self._unfinished.rename(self._target)
        sync_folder(self._target.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's signature
        """Whether torch may choose this storage by a path alone: never."""
        return False

    def _manifest(self, files: tuple[FileRecord, ...]) -> Manifest:
        contents = self._contents
        return Manifest(
            version=contents.version,
            written_at_ns=time.time_ns(),
            torch=str(torch.__version__),
            mesh=contents.mesh,
            model=contents.model,
            weights=contents.weights,
            files=files,
        )


class CheckpointReader(StorageReader):
    """Reads boxes, or parts of them, from a complete checkpoint.

    Raises:
        CheckpointError: the index names a file that does not lie in the folder.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self._folder = folder
        self._index = index
        self._files = {
            (name, tuple(box["offsets"])): box["file"] for name, each in index.items() for box in each["boxes"]
        }
        if strange := [name for name in self._files.values() if not is_plain_name(name)]:
            raise CheckpointError(
                f"{folder / INDEX}: names {strange[0]!r}, which is no file of its own folder; only files of {folder} "
                f"are read"
            )

    @property
    def files(self) -> frozenset[str]:
        """Names of all files that it may read."""
        return frozenset(self._files.values())

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one checkpoint, whose name it has."""

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """What was saved."""
        return metadata_of(self._index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, and of each box only what is asked for."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index.fqn, _offsets(item.storage_index)], []).append(item)
        for name, items in by_file.items():
            _read(self._folder / name, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's signature
        """Whether torch may choose this storage by a path alone: never."""
        return False


def metadata_of(index: Mapping[str, Any]) -> Metadata:
    """What `tensors.json` holds, in the form that torch plans with."""
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, each["dtype"])),
                size=torch.Size(each["shape"]),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(box["offsets"]), sizes=torch.Size(box["sizes"]))
                    for box in each["boxes"]
                ],
            )
            for name, each in index.items()
        }
    )


def _index(metadata: Metadata, written: list[WriteResult]) -> dict[str, Any]:
    files = {(result.index.fqn, _offsets(result.index)): result.storage_data.name for result in written}
    index: dict[str, Any] = {}
    for name, each in metadata.state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        boxes = [
            {"offsets": [*box.offsets], "sizes": [*box.sizes], "file": files[name, tuple(box.offsets)]}
            for box in each.chunks
        ]
        index[name] = {"dtype": dtype_name(each.properties.dtype), "shape": [*each.size], "boxes": boxes}
    return index


def _entry(item: WriteItem, planner: SavePlanner) -> TensorEntry:
    data = item.tensor_data
    assert data is not None
    return TensorEntry(
        key=_key(item.index),
        dtype=data.properties.dtype,
        shape=tuple(data.chunk.sizes),
        read=partial(_resolve, planner, item),
    )


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor


def _read(path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for item in items:
                target = planner.resolve_tensor(item)
                parts = zip(item.storage_offsets, item.lengths, strict=True)
                slices = tuple(slice(start, start + length) for start, length in parts)
                key = _key(item.storage_index)
                target.copy_(file.get_slice(key)[slices] if slices else file.get_tensor(key))
                planner.commit_tensor(item, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, _offsets(index)))}"


def _offsets(index: MetadataIndex) -> tuple[int, ...]:
    assert index.offset is not None
    return tuple(index.offset)
