"""Planners of torch's Distributed Checkpoint over pieces: who writes which box, and which saved boxes fill which.

Boxes are in the coordinates of the unsharded model, so that what one mesh wrote any other can read. They know no files.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
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
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rl_backends.checkpoints.flat_boxes import FlatBox
from rl_backends.checkpoints.pieces import Piece
from rl_backends.errors import CheckpointError
from rl_parallel_plans import Box

__all__ = ["PieceLoadPlanner", "PieceSavePlanner"]


class PieceSavePlanner(DefaultSavePlanner):
    """Writes every box once, whichever ranks hold it; torch's own planner spreads them and checks that they cover."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the pieces, by name."""
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self._boxes = {
            (piece.saved_as or name, box.offsets): (piece, box)
            for name, piece in state_dict.items()
            for box in piece.boxes
        }

    def create_local_plan(self) -> SavePlan:
        """One item for each box that this rank holds."""
        items = [_write_item(name, piece, box) for (name, _), (piece, box) in self._boxes.items()]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The numbers of one box: a view of this rank's memory."""
        return _view(self._boxes, write_item.index)


class PieceLoadPlanner(LoadPlanner):
    """Fills the boxes of this rank's pieces, in place, from whatever boxes were saved."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the pieces, by name, and what was saved."""
        assert metadata is not None
        self._pieces: dict[str, Piece] = state_dict
        self._saved = metadata.state_dict_metadata
        self._boxes = {(name, box.offsets): (piece, box) for name, piece in state_dict.items() for box in piece.boxes}

    def create_local_plan(self) -> LoadPlan:
        """Which parts of saved boxes fill the boxes of this rank.

        Raises:
            CheckpointError: they do not fill them.
        """
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            if piece.boxes:
                items += _read_items(name, piece, self._saved.get(piece.saved_as or name))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Each rank reads what it needs."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it was made."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the numbers go: a view of this rank's memory."""
        box = _view(self._boxes, read_item.dest_index)
        return box[_slices(read_item.dest_offsets, read_item.lengths)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: what was read is in place."""

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        """Never asked for: only tensors are planned."""
        raise AssertionError(read_item)


Boxes = dict[tuple[str, tuple[int, ...]], tuple[Piece, Box | FlatBox]]


def _view(boxes: Boxes, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    piece, box = boxes[index.fqn, tuple(index.offset)]
    return box.of_local(piece.local)


def _write_item(name: str, piece: Piece, box: Box | FlatBox) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(box), properties=TensorProperties(dtype=piece.local.dtype), size=torch.Size(piece.shape)
        ),
    )


def _read_items(name: str, piece: Piece, saved: object) -> list[ReadItem]:
    source = piece.saved_as or name
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no {source}: it was written by another model or optimizer")
    if tuple(saved.size) != piece.shape or saved.properties.dtype not in {piece.local.dtype, *piece.takes}:
        raise CheckpointError(
            f"{source} is {saved.properties.dtype} {list(saved.size)} in the checkpoint and {piece.local.dtype} "
            f"{list(piece.shape)} here: it was written by another model or optimizer"
        )
    items: list[ReadItem] = create_read_items_for_chunk_list(source, saved, [_chunk(box) for box in piece.boxes])
    found = sum(item.lengths.numel() for item in items)
    wanted = sum(torch.Size(box.sizes).numel() for box in piece.boxes)
    if found != wanted:
        raise CheckpointError(f"the checkpoint holds {found} of the {wanted} numbers of {source} that this rank needs")
    return [replace(item, dest_index=replace(item.dest_index, fqn=name)) for item in items]


def _chunk(box: Box | FlatBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
