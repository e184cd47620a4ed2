"""torch's Distributed Checkpoint (DCP) over `TensorShard`s, stored as safetensors and JSON.

DCP plans which rank writes which box, spreads duplicates over the ranks, checks that the boxes cover every tensor,
computes which saved boxes fill which boxes of another mesh, and runs asynchronous saves. The planners here give it our
boxes, and the writer and reader here the files that `manifest` describes: torch's file system storage keeps its index
in a pickle, and its Hugging Face storage has no digests and one box a rank of each tensor (see
docs/adr/0015-our-own-dcp-storage.md).
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rl_backends.checkpoints.folders import Record, record_of, sync, write_json, write_safetensors
from rl_backends.checkpoints.manifest import DAMAGED, INDEX, MARKER, STATE, Manifest, write_manifest
from rl_backends.checkpoints.shards import FlatBox, TensorShard, dtype_name
from rl_backends.errors import CheckpointError
from rl_parallel_plans import Box

CHUNK_BYTES = 64 * 2**20
"""Of host memory that is allocated at a time. A power of two, to which torch rounds pinned memory up."""


def describe_failure(error: BaseException) -> str:
    """What DCP raised, without its tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, (each, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"


# ---- Planners.


def _by_index(shards: Mapping[str, TensorShard], *, saved: bool) -> dict[tuple[str, Any], tuple[TensorShard, Any]]:
    """Every box and its shard, by name (in the checkpoint where `saved`) and offsets."""
    return {
        ((shard.saved_as if saved else None) or name, box.offsets): (shard, box)
        for name, shard in shards.items()
        for box in shard.boxes
    }


class ShardSavePlanner(DefaultSavePlanner):
    """Plans one item for each box of this rank's shards; DCP's planner removes duplicates and checks coverage."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the shards, by name."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self._boxes = _by_index(state_dict, saved=True)

    def create_local_plan(self) -> SavePlan:
        """One item for each box."""
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(box.offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(box),
                        properties=TensorProperties(dtype=shard.local.dtype),
                        size=torch.Size(shard.shape),
                    ),
                )
                for (name, _), (shard, box) in self._boxes.items()
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A box as a view of this rank's memory."""
        shard, box = self._boxes[write_item.index.fqn, write_item.index.offset]
        view: Tensor = box.of_local(shard.local)
        return view


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans reads that fill the boxes of this rank's shards, in place, from whatever boxes were saved."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the shards, by name, and what was saved."""
        assert metadata is not None
        self._shards: dict[str, TensorShard] = state_dict
        self._saved = metadata.state_dict_metadata
        self._boxes = _by_index(state_dict, saved=False)

    def create_local_plan(self) -> LoadPlan:
        """Which parts of saved boxes fill the boxes of this rank."""
        items: list[ReadItem] = []
        for name, shard in self._shards.items():
            if not shard.boxes:
                continue
            source = shard.saved_as or name
            saved = self._saved.get(source)
            if not isinstance(saved, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint has no {source}: it was written by another model or optimizer")
            if tuple(saved.size) != shard.shape or saved.properties.dtype not in {shard.local.dtype, *shard.takes}:
                raise CheckpointError(
                    f"{source} is {saved.properties.dtype} {list(saved.size)} in the checkpoint and "
                    f"{shard.local.dtype} {list(shard.shape)} here: it was written by another model or optimizer"
                )
            found = create_read_items_for_chunk_list(source, saved, [_chunk(box) for box in shard.boxes])
            num_elements = sum(item.lengths.numel() for item in found)
            wanted = sum(torch.Size(box.sizes).numel() for box in shard.boxes)
            if num_elements != wanted:
                raise CheckpointError(
                    f"the checkpoint holds {num_elements} of the {wanted} elements of {source} that this rank needs"
                )
            items += [replace(item, dest_index=replace(item.dest_index, fqn=name)) for item in found]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the elements go: a view of this rank's memory."""
        shard, box = self._boxes[read_item.dest_index.fqn, read_item.dest_index.offset]
        view: Tensor = box.of_local(shard.local)[_slices(read_item.dest_offsets, read_item.lengths)]
        return view


def _chunk(box: Box | FlatBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


# ---- Host memory.


class StagingBuffers:
    """Host memory into which saves copy shards, kept for the next save; pinned if the shards are on a GPU.

    Only one save runs at a time, so that its memory is free when the next one begins.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0
        self._copied: torch.cuda.Event | None = None

    def stage(self, shards: Mapping[str, TensorShard]) -> dict[str, TensorShard]:
        """Copy what the boxes hold, and nothing beside: their storage is often that of other tensors too.

        From a GPU the copies run on a stream of their own. Work that is queued on the current stream afterwards waits
        for them on the device, so that training may change the weights; `wait` before the copies are read.
        """
        self._chunk = self._offset = 0
        device = next((shard.local.device for shard in shards.values() if shard.local.is_cuda), None)
        if device is None:
            return {name: self._copy(shard, pinned=False) for name, shard in shards.items()}
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            staged = {name: self._copy(shard, pinned=True) for name, shard in shards.items()}
        self._copied = side.record_event()
        current.wait_stream(side)
        return staged

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, shard: TensorShard, *, pinned: bool) -> TensorShard:
        sizes = [torch.Size(box.sizes).numel() for box in shard.boxes]
        local = self._take(sum(sizes) * shard.local.itemsize, pinned=pinned).view(shard.local.dtype)
        boxes: list[FlatBox] = []
        start = 0
        for box, size in zip(shard.boxes, sizes, strict=True):
            boxes.append(FlatBox(offsets=box.offsets, sizes=box.sizes, start=start))
            boxes[-1].of_local(local).copy_(box.of_local(shard.local), non_blocking=pinned)
            start += size
        return replace(shard, local=local, boxes=tuple(boxes))

    def _take(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Unused memory, uint8 [num_bytes]; allocated if no chunk has room."""
        while self._chunk < len(self._chunks) and self._offset + num_bytes > self._chunks[self._chunk].numel():
            self._chunk, self._offset = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            size = max(num_bytes, CHUNK_BYTES if pinned else 0)
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        start = self._offset
        self._offset += -(-num_bytes // 64) * 64  # so that any dtype is aligned
        return self._chunks[self._chunk][start : start + num_bytes]


# ---- Storage.


class CheckpointWriter(FileSystemWriter):
    """Writes each rank's boxes into the folder `unfinished`, which exists, and renames it to `target` at the end."""

    def __init__(  # noqa: PLR0917 - from, to, and what goes there
        self, unfinished: Path, target: Path, manifest: Manifest, state: dict[str, Any], *, buffers: StagingBuffers
    ) -> None:
        """`state`: the content of `state.json`."""
        super().__init__(unfinished)
        self._unfinished, self._target = unfinished, target
        self._manifest, self._state, self._buffers = manifest, state, buffers

    def stage(self, state_dict: dict[str, TensorShard]) -> dict[str, TensorShard]:
        """Copy this rank's shards to host memory before training may change them."""
        return self._buffers.stage(state_dict)

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
            self._buffers.wait()
            tensors: dict[str, Any] = {_key(item.index): planner.resolve_data(item) for item in plan.items}
            addresses: set[int] = set()
            for key, tensor in tensors.items():
                # safetensors refuses tensors that share memory, as the step count of a fused q, k and v does.
                shared = tensor.data_ptr() in addresses and tensor.numel() > 0
                tensors[key] = tensor.detach().clone() if shared else tensor.detach().contiguous()
                addresses.add(tensor.data_ptr())
            path = self._unfinished / plan.storage_data
            write_safetensors(path, tensors)
            written = path.name, record_of(path)
            results = [
                WriteResult(index=item.index, size_in_bytes=tensor.nbytes, storage_data=written)
                for item, tensor in zip(plan.items, tensors.values(), strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: write index, state and marker, and rename the folder."""
        all_results = [result for each in results for result in each]
        files: dict[str, Record] = dict(result.storage_data for result in all_results)
        file_of = {(result.index.fqn, result.index.offset): result.storage_data[0] for result in all_results}
        index: dict[str, Any] = {}
        for name, each in metadata.state_dict_metadata.items():
            assert isinstance(each, TensorStorageMetadata)
            boxes = [
                {"offsets": [*box.offsets], "sizes": [*box.sizes], "file": file_of[name, box.offsets]}
                for box in each.chunks
            ]
            index[name] = {"dtype": dtype_name(each.properties.dtype), "shape": [*each.size], "boxes": boxes}
        for name, value in ((INDEX, index), (STATE, self._state)):
            write_json(self._unfinished / name, value)
            files[name] = record_of(self._unfinished / name)
        write_manifest(self._unfinished, replace(self._manifest, written_at_ns=time.time_ns(), files=files))
        sync([self._unfinished])
        self._unfinished.rename(self._target)
        sync([self._target.parent])


class CheckpointReader(FileSystemReader):
    """Reads boxes, or parts of them, from a complete checkpoint, and from `files` of its marker alone."""

    def __init__(self, folder: Path, index: Mapping[str, Any], *, files: Collection[str]) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index
        self._file_of = {
            (name, tuple(box["offsets"])): box["file"] for name, each in index.items() for box in each["boxes"]
        }
        if unlisted := [name for name in self._file_of.values() if name not in files]:
            raise CheckpointError(f"{folder / INDEX}: names {unlisted[0]!r}, which {MARKER} does not list; {DAMAGED}")

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """What was saved."""
        return metadata_of(self._index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """Nothing to do: the index is known."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, and of each box only what is asked for."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            assert index.offset is not None
            by_file.setdefault(self._file_of[index.fqn, tuple(index.offset)], []).append(item)
        for name, items in by_file.items():
            path = self._folder / name
            try:
                with safe_open(path, framework="pt") as file:
                    for item in items:
                        slices, key = _slices(item.storage_offsets, item.lengths), _key(item.storage_index)
                        saved = file.get_slice(key)[slices] if slices else file.get_tensor(key)
                        planner.resolve_tensor(item).copy_(saved)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future


def metadata_of(index: Mapping[str, Any]) -> Metadata:
    """The content of `tensors.json` in the form that DCP plans with."""
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


def _key(index: MetadataIndex) -> str:
    assert index.offset is not None
    return f"{index.fqn}@{','.join(map(str, index.offset))}"
