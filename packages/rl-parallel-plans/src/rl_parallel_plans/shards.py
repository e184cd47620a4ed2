"""Which part of each whole tensor this rank holds, in the coordinates of the unsharded model.

For whatever reads or writes weights rank by rank (checkpoints, loaders, transports) and so must not gather them. Works
under tensor parallelism, FSDP, both or neither. It undoes in coordinates what `export_state_dict` undoes in tensors:
rows of fused weights in the order of the ranks, names that wrappers put in. Moves no number.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.export import entries, reshard
from rl_parallel_plans.row_order import RowOrder

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A contiguous part of a whole tensor, and where it lies in this rank's local tensor."""

    offsets: tuple[int, ...]
    """Of its first element in the whole tensor, in the unsharded model's order of rows."""
    sizes: tuple[int, ...]
    """Its shape."""
    local_offsets: tuple[int, ...]
    """Of its first element in the local tensor."""

    def of_local(self, local: Tensor) -> Tensor:
        """A view of the box in this rank's tensor."""
        return local[tuple(slice(start, start + size) for start, size in zip(self.local_offsets, self.sizes))]  # noqa: B905

    def of_whole(self, whole: Tensor) -> Tensor:
        """A view of the box in the unsharded tensor."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes))]  # noqa: B905


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShard:
    """What this rank holds of one parameter or buffer."""

    name: str
    """In the unsharded model."""
    tensor: Tensor
    """As the module has it: a DTensor or a plain tensor; of a fused weight in the shape in which it is registered."""
    shape: tuple[int, ...]
    """Of the whole."""
    row_order: RowOrder | None = None
    """Which rows of a fused weight each rank holds; None where sharding kept their order."""

    @property
    def local(self) -> Tensor:
        """This rank's tensor, its memory and not a copy; on the device where it lies."""
        return self.local_of(self.tensor)

    def local_of(self, tensor: Tensor) -> Tensor:
        """As `local`, of another tensor that is sharded alike, such as a moment of the optimizer."""
        tensor = tensor.detach()
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        return local if self.row_order is None else self.row_order.local(local)

    def boxes(self, tensor: Tensor | None = None) -> list[Box]:
        """The parts of the whole that `local` consists of; none where this rank holds nothing.

        tensor: another one that is sharded alike, such as a moment of the optimizer.
        """
        return local_boxes(self.tensor if tensor is None else tensor, row_order=self.row_order)


def named_shards(model: nn.Module) -> Iterator[NamedShard]:
    """Every parameter and persistent buffer in the model's order, a tied one once, under its first name.

    Parameters that a forward left gathered are sharded first. No collective.
    """
    reshard(model)
    seen: set[int] = set()
    for name, tensor, order in entries(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shape = tuple(tensor.shape) if order is None else order.shape(tensor.shape)
            yield NamedShard(name=name, tensor=tensor, shape=shape, row_order=order)


def local_boxes(tensor: Tensor, *, row_order: RowOrder | None = None) -> list[Box]:
    """The parts of the whole that this rank's piece of `tensor` consists of, in any placement.

    tensor: a DTensor, or a plain tensor, which is whole.
    row_order: which rows of a fused weight each rank holds, where `tensor` is registered as one; None for their own.

    Together the boxes of all ranks cover the whole; where it is replicated, more than once. Raises ValueError for a
    Partial placement, which is no part of a tensor but a term of it.
    """
    indices = [_local_indices(tensor, dim) for dim in range(tensor.ndim)]
    if row_order is not None:
        # One dim counts the ranks of tp, of which there is one here. Boxes are those of the tensor without it.
        (rank,) = indices.pop(row_order.ranks_dim).tolist()
        indices[row_order.dim] = row_order.rows[rank][indices[row_order.dim]]
    runs = [list(_runs(each.tolist())) for each in indices]
    return [
        Box(
            offsets=tuple(start for start, _, _ in box),
            sizes=tuple(size for _, size, _ in box),
            local_offsets=tuple(at for _, _, at in box),
        )
        for box in itertools.product(*runs)
    ]


def _local_indices(tensor: Tensor, dim: int) -> Tensor:
    """Positions along `dim` of the whole that this rank holds, in their local order."""
    whole = torch.arange(tensor.shape[dim])
    if not is_dtensor(tensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh = tensor.device_mesh
    along = [_along(placement, dim, tensor.ndim) for placement in tensor.placements]
    # Asking DTensor, whose uneven and strided cuts are its own affair; without a source rank it sends nothing.
    return distribute_tensor(whole.to(mesh.device_type), mesh, along, src_data_rank=None).to_local().cpu()


def _along(placement: "Placement", dim: int, ndim: int) -> "Placement":
    """The placement as it cuts this dim alone."""
    from torch.distributed.tensor import Replicate, Shard

    if placement.is_partial():
        raise ValueError(f"a tensor with the placement {placement} is a term of a sum: redistribute it first")
    if placement.is_replicate() or getattr(placement, "dim", dim) % ndim != dim:
        return Replicate()
    if (split_factor := getattr(placement, "split_factor", None)) is not None:
        strided: Any = type(placement)
        return strided(0, split_factor=split_factor)  # type: ignore[no-any-return]
    return Shard(0)


def _runs(indices: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, how many, where in the list) of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield indices[start], at - start, start
            start = at
