"""The files of a checkpoint: what they hold, which rank writes which part, and what is read of them.

    <folder>/rank-00000-of-00002.safetensors    boxes of tensors: key `<tensor>@<offset>,<offset>`
    <folder>/tensors.json                       dtype, shape and boxes of each tensor, and the file of each box
    <folder>/state.json                         everything that is not a tensor
    <folder>/checkpoint.json                    the marker

A folder is a checkpoint if it has the marker, which is written last and appears with the folder, by one rename. It
holds the size and SHA-256 of every other file, and the SHA-256 of its own text.

torch's Distributed Checkpoint is not used: its storage for Hugging Face has no digests and one box a rank of each
tensor, its own keeps the index in a pickle, and what is left to plan is shorter here than what would adapt it (see
docs/adr/0017-checkpoints-without-dcp.md).
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.checkpoints.folders import (
    Record,
    read_marker,
    record_of,
    sync,
    write_json,
    write_marker,
    write_safetensors,
)
from rl_backends.checkpoints.shards import FlatBox, TensorShard, dtype_name, num_ranks, this_rank
from rl_backends.errors import CheckpointError
from rl_backends.rank_agreement import gather_text, on_rank_0

MARKER, INDEX, STATE = "checkpoint.json", "tensors.json", "state.json"
FORMAT = ("rl-backends checkpoint", 2)

DAMAGED = "restore it from a copy, or resume from another checkpoint"
CHUNK_BYTES = 64 * 2**20
"""Of host memory that is allocated at a time. A power of two, to which torch rounds pinned memory up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of the marker."""

    version: int
    mesh: dict[str, Any]
    """`ranks`, and the `axes` with their sizes."""
    model: dict[str, list[Any]]
    """Fingerprint: name -> [dtype, shape] of every parameter and persistent buffer."""
    torch: str = str(torch.__version__)
    written_at_ns: int = 0
    """When the checkpoint was completed, in nanoseconds since 1970."""
    files: dict[str, Record] = field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint of this format; its files are not looked at."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint; find_latest(parent) names the newest complete one")
    body = read_marker(folder / MARKER, format=FORMAT, remedy=DAMAGED, check=False)
    del body["format"], body["format_version"]
    try:
        return Manifest(**body)
    except TypeError as error:
        raise CheckpointError(f"{folder / MARKER} is damaged: {error}; {DAMAGED}") from error


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; {DAMAGED}") from error


def check_model(folder: Path, saved: Mapping[str, list[Any]], here: Mapping[str, list[Any]]) -> None:
    """Check that the checkpoint is of this model: names, shapes and dtypes."""
    if saved == here:
        return
    differences = [f"{name} is only in the checkpoint" for name in saved if name not in here]
    differences += [f"{name} is only in this model" for name in here if name not in saved]
    differences += [
        f"{name} is {' '.join(map(str, saved[name]))} in the checkpoint and {' '.join(map(str, here[name]))} here"
        for name in saved
        if name in here and saved[name] != here[name]
    ]
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    raise CheckpointError(
        f"{folder}: a checkpoint of another model: {'; '.join(differences[:3])}{more}. Build the model that wrote "
        f"it, in the same dtype, or choose another checkpoint"
    )


# ---- Host memory.


class StagingBuffers:
    """Host memory into which saves copy shards, kept for the next save; pinned if the shards are on a GPU.

    Only one save runs at a time, so that its memory is free when the next one begins.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk = self._offset = 0
        self._copied: torch.cuda.Event | None = None

    def stage(self, shards: Sequence[TensorShard]) -> list[TensorShard]:
        """Copy what the boxes hold, and nothing beside: their storage is often that of other tensors too.

        From a GPU the copies run on a stream of their own. Work that is queued on the current stream afterwards waits
        for them on the device, so that training may change the weights; `wait` before the copies are read.
        """
        self._chunk = self._offset = 0
        device = next((shard.local.device for shard in shards if shard.local.is_cuda), None)
        if device is None:
            return [self._copy(shard, pinned=False) for shard in shards]
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            staged = [self._copy(shard, pinned=True) for shard in shards]
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


# ---- Writing.


def write_boxes(
    unfinished: Path,
    target: Path,
    shards: Sequence[TensorShard],
    *,
    manifest: Manifest,
    state: Mapping[str, Any],
    buffers: StagingBuffers,
    group: dist.ProcessGroup | None,
) -> None:
    """Write the boxes of all ranks into the folder `unfinished`, which exists, and rename it to `target` at the end.

    Every rank must call it. Of a box that several ranks hold, the one with least to write writes it: each of them makes
    the same plan of what all hold.

    Raises:
        CheckpointError: on every rank; some rank cannot write, or the ranks together do not hold all of a tensor.
    """
    parts = {(shard.saved_as, box.offsets): (shard, box) for shard in shards for box in shard.boxes}
    own = [
        [name, dtype_name(shard.local.dtype), shard.shape, offsets, box.sizes]
        for (name, offsets), (shard, box) in parts.items()
    ]
    index, written = _planned(own, group=group)
    file = unfinished / _file_of(this_rank())
    record: Record | None = None
    failure = ""
    try:
        tensors: dict[str, Tensor] = {}
        addresses: set[int] = set()
        buffers.wait()
        for (name, offsets), (shard, box) in parts.items():
            if (key := _key(name, offsets)) in written:
                part = box.of_local(shard.local).detach()
                # safetensors refuses tensors that share memory, as the step count of a fused q, k and v does.
                shared = part.data_ptr() in addresses and part.numel() > 0
                tensors[key] = part.clone() if shared else part.contiguous()
                addresses.add(part.data_ptr())
        if tensors:
            write_safetensors(file, tensors)
            record = record_of(file)
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        failure = f"{type(error).__name__}: {error}"
    told = [json.loads(text) for text in gather_text(json.dumps([record, failure]), group=group)]
    if failed := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]:
        raise CheckpointError("; ".join(failed))

    def finish() -> None:
        files = {_file_of(rank): tuple(each) for rank, (each, _) in enumerate(told) if each is not None}
        for name, value in ((INDEX, index), (STATE, state)):
            write_json(unfinished / name, value)
            files[name] = record_of(unfinished / name)
        body = asdict(replace(manifest, written_at_ns=time.time_ns(), files=files))
        write_marker(unfinished / MARKER, body, format=FORMAT, files=files)
        sync([unfinished])
        unfinished.rename(target)
        sync([target.parent])

    on_rank_0(finish, group=group)


def _planned(own: list[Any], *, group: dist.ProcessGroup | None) -> tuple[dict[str, Any], set[str]]:
    """The index of all tensors, and the keys of the boxes that this rank writes.

    own: name, dtype, shape, offsets and sizes of each box that this rank holds.
    """
    index: dict[str, Any] = {}
    boxes: dict[tuple[str, tuple[int, ...]], tuple[Sequence[int], list[int]]] = {}
    for rank, text in enumerate(gather_text(json.dumps(own), group=group)):
        for name, dtype, shape, offsets, sizes in json.loads(text):
            index.setdefault(name, {"dtype": dtype, "shape": shape, "boxes": []})
            boxes.setdefault((name, tuple(offsets)), (sizes, []))[1].append(rank)
    loads, mine = [0] * num_ranks(), set[str]()
    for (name, offsets), (sizes, ranks) in boxes.items():
        writer = min(ranks, key=loads.__getitem__)
        loads[writer] += math.prod(sizes) * getattr(torch, index[name]["dtype"]).itemsize
        index[name]["boxes"].append({"offsets": [*offsets], "sizes": sizes, "file": _file_of(writer)})
        if writer == this_rank():
            mine.add(_key(name, offsets))
    for name, each in index.items():
        held, whole = sum(math.prod(box["sizes"]) for box in each["boxes"]), math.prod(each["shape"])
        if held != whole:
            raise CheckpointError(f"all ranks together hold {held} of the {whole} elements of {name}")
    return index, mine


def _file_of(rank: int) -> str:
    return f"rank-{rank:05}-of-{num_ranks():05}.safetensors"


def _key(name: str, offsets: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


# ---- Reading.

Reads = dict[str, list[tuple[str, tuple[slice, ...], Tensor]]]
"""By file: the key of a saved box, which part of it, and where that goes."""


def read_index(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The content of `tensors.json`, in which no file is named that the marker does not vouch for."""
    index: dict[str, Any] = read_json(folder / INDEX)
    names = [box["file"] for each in index.values() for box in each["boxes"]]
    if unlisted := [name for name in names if name not in manifest.files]:
        raise CheckpointError(f"{folder / INDEX}: names {unlisted[0]!r}, which {MARKER} does not list; {DAMAGED}")
    return index


def plan_reads(folder: Path, index: Mapping[str, Any], shards: Iterable[TensorShard]) -> Reads:
    """Which parts of the saved boxes in `index` fill the boxes of this rank's shards, in place.

    Raises:
        CheckpointError: a tensor is absent, of another dtype or shape, or not all there.
    """
    of_another = "it was written by another model or optimizer"
    reads: Reads = {}
    for shard in shards:
        if not shard.boxes:
            continue
        name = shard.saved_as
        if (entry := index.get(name)) is None:
            raise CheckpointError(f"{folder}: the checkpoint has no {name}: {of_another}")
        dtype, shape = getattr(torch, entry["dtype"]), tuple(entry["shape"])
        if shape != shard.shape or dtype not in {shard.local.dtype, *shard.takes}:
            raise CheckpointError(
                f"{folder}: {name} is {dtype} {list(shape)} in the checkpoint and {shard.local.dtype} "
                f"{list(shard.shape)} here: {of_another}"
            )
        found = wanted = 0
        for box in shard.boxes:
            wanted += math.prod(box.sizes)
            for saved in entry["boxes"]:
                common = [
                    (max(start, other), min(start + size, other + others))
                    for start, size, other, others in zip(
                        box.offsets, box.sizes, saved["offsets"], saved["sizes"], strict=True
                    )
                ]
                if all(low < high for low, high in common):
                    found += math.prod(high - low for low, high in common)
                    there, here = (
                        tuple(
                            slice(low - start, high - start) for (low, high), start in zip(common, starts, strict=True)
                        )
                        for starts in (saved["offsets"], box.offsets)
                    )
                    place = box.of_local(shard.local)[here]
                    reads.setdefault(saved["file"], []).append((_key(name, saved["offsets"]), there, place))
        if found != wanted:
            raise CheckpointError(
                f"{folder}: the checkpoint holds {found} of the {wanted} elements of {name} that this rank needs"
            )
    return reads


@torch.no_grad()
def read_boxes(folder: Path, reads: Reads) -> None:
    """Do what was planned, file by file; of each box only what is asked for is read."""
    from safetensors import SafetensorError, safe_open

    for name, items in reads.items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key, there, place in items:
                    place.copy_(file.get_slice(key)[there] if there else file.get_tensor(key))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
