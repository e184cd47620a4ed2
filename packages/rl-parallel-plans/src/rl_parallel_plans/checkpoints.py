"""Where the weights of a sharded model are in the unsharded one, and the unsharded weights themselves.

`RowOrder` says which rows of a fused weight each rank of the tp axis holds. Such a weight ([q | k | v], [gate | up])
has to give every rank some rows of each segment, which no `Shard(dim)` of the weight does. So a sharded one is
registered in another shape, in which it does:

    unsharded     [rows, ...]              [experts, rows, ...]
    registered    [rows / tp, tp, ...]     [experts, tp, rows / tp, ...]     Shard(1): the dim that counts ranks
    local         [rows / tp, 1, ...]      [experts, 1, rows / tp, ...]      a rank's rows, in the order of its forward

Every piece of it is a plain contiguous shard, so FSDP (which shards dim 0), optimizers and torch's distributed
checkpoints handle it as any other parameter. The shape differs from the unsharded one and from that at every other tp,
so that a mistake about the layout (in an optimizer's state, for example) fails on the shape instead of training on
permuted rows.

`export_state_dict` gathers one tensor after another, so that the memory in use is that of the largest one, under
Hugging Face's names and in their layouts: rows of fused weights go back to their order, names lose what wrappers put
in, a tied parameter is one again. `named_shards` tells the same in coordinates, without moving a number: which part of
each unsharded tensor this rank holds. Both work under tensor parallelism, FSDP, both or neither.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.pipeline.stages import stage_info
from rl_parallel_plans.structure import joined

RowsOfRanks = Callable[[int, int], Tensor]
"""(tp, rows) to the index [rows] of the row that stands at each place when rank 0's rows come first, then rank 1's."""
RowsRead = Callable[[int, int], Sequence[slice]]
"""(tp, rank) to the rows of a replicated parameter that the rank computes with."""
ATTRIBUTE = "row_orders"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowOrder:
    """Which rows of a fused tensor each rank of the tp axis holds."""

    dim: int
    """Dim of the unsharded tensor that the rows are counted along."""
    rows: Tensor
    """[tp, rows / tp] index in the unsharded tensor of each row of each rank."""

    @property
    def ranks_dim(self) -> int:
        """Dim of the registered tensor that counts the ranks: not dim 0, which FSDP shards."""
        return max(self.dim, 1)

    def same_as(self, other: "RowOrder") -> bool:
        """Whether both deal the same rows to the same ranks."""
        return self.dim == other.dim and torch.equal(self.rows, other.rows)

    def dealt(self, unsharded: Tensor) -> Tensor:
        """The unsharded tensor in the registered shape: a copy."""
        by_place = self.rows.T if self.dim == 0 else self.rows
        rows = unsharded.index_select(self.dim, by_place.flatten().to(unsharded.device))
        return rows.view(*rows.shape[: self.dim], *by_place.shape, *rows.shape[self.dim + 1 :])

    def undealt(self, registered: Tensor) -> Tensor:
        """The whole of a registered tensor in the shape and order of the unsharded one: a copy."""
        by_rank = registered.transpose(0, 1) if self.dim == 0 else registered
        rows = by_rank.flatten(self.dim, self.dim + 1)
        return torch.empty_like(rows).index_copy_(self.dim, self.rows.flatten().to(rows.device), rows)

    def local(self, local: Tensor) -> Tensor:
        """A rank's piece of a registered tensor without the dim that counts ranks: a view."""
        return local.squeeze(self.ranks_dim)

    def shape(self, registered: Sequence[int]) -> tuple[int, ...]:
        """The unsharded shape."""
        return (*registered[: self.dim], self.rows.numel(), *registered[self.dim + 2 :])


def segments_in_order(sizes: Sequence[int]) -> RowsOfRanks:
    """Every rank takes its part of each segment, one after the other: q_0 k_0 v_0 q_1 k_1 v_1 ..."""

    def order(tp: int, rows: int) -> Tensor:
        segments = torch.split(torch.arange(rows), list(sizes))
        return torch.cat([segment.chunk(tp)[rank] for rank in range(tp) for segment in segments])

    return order


def halves_in_order(tp: int, rows: int) -> Tensor:
    """[gate | up]: every rank takes its part of both."""
    return segments_in_order([rows // 2, rows - rows // 2])(tp, rows)


def segments_read(sizes: Sequence[int]) -> RowsRead:
    """A rank's part of each segment."""

    def read(tp: int, rank: int) -> list[slice]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        shares = [size // tp for size in sizes]
        return [
            slice(start + rank * share, start + (rank + 1) * share) for start, share in zip(starts, shares, strict=True)
        ]

    return read


def row_orders(module: nn.Module) -> dict[str, RowOrder]:
    """The order of each of the module's own parameters that sharding has dealt row by row; kept by `to`, `deepcopy`."""
    orders: dict[str, RowOrder] = module.__dict__.get(ATTRIBUTE, {})
    return orders


def set_row_order(module: nn.Module, name: str, order: RowOrder) -> None:
    """Record how the rows of `module`'s parameter `name` were dealt."""
    module.__dict__.setdefault(ATTRIBUTE, {})[name] = order


# -- Tensors of the unsharded model ------------------------------------------------------------------

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})
"""Tokens of dotted names that wrappers of torch put in."""


@torch.no_grad()
def export_state_dict(
    model: nn.Module,
    *,
    every_rank: bool = False,
    tied_names: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of every parameter and persistent buffer, in the model's order.

    A collective: every rank must iterate to the end. `for name, tensor in export_state_dict(model): ...` is the same
    line on all of them; its body runs on rank 0 alone, and the others only take part in gathering.

    Of a pipeline stage: the weights that it holds, under their names in the model and without the copies of tied ones
    that an earlier stage has, on the first of the stage's ranks. `Pipeline.export_state_dict` has all stages'.

    every_rank: yield on every rank, and not on rank 0 alone.
    tied_names: give a tied tensor under each of its names; otherwise under the first, as files of weights have it.
    dtype: of floating-point tensors; None keeps each one's own. It is that of the sharded parameters, whatever dtype
        the forward gathers them in.
    device: where the whole tensor goes; None leaves it where it was gathered.

    A yielded tensor may share memory with the model where nothing had to be gathered: copy it before changing either.
    """
    reshard(model)
    stage = stage_info(model)
    if stage is not None:
        is_first = is_first_of_its_ranks(model)
    else:
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    copies = frozenset() if stage is None else stage.copies
    seen: set[int] = set()
    for name, tensor, order in entries(model):
        if (id(tensor) in seen or name in copies) and not tied_names:
            continue
        seen.add(id(tensor))
        if every_rank or is_first:  # no variable keeps what is yielded alive while the next one is gathered
            yield name, _whole(tensor, order).to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        else:
            _whole(tensor, order)


def reshard(model: nn.Module) -> None:
    """Put the shards back: after a forward without a backward, some parameters are those that the forward gathered."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def is_first_of_its_ranks(stage: nn.Module) -> bool:
    """Whether this is the first of the ranks that shard the parameters of a pipeline stage, or the only one."""
    meshes = {parameter.device_mesh for parameter in stage.parameters() if is_dtensor(parameter)}
    return not any(any(mesh.get_coordinate() or ()) for mesh in meshes)


def entries(model: nn.Module) -> Iterator[tuple[str, Tensor, RowOrder | None]]:
    """Name, tensor and order of rows of everything that a state dict has, in its order."""
    for path, module in model.named_modules(remove_duplicate=False):
        unwrapped = ".".join(token for token in path.split(".") if token not in WRAPPERS)
        orders = row_orders(module)
        transient = module._non_persistent_buffers_set  # noqa: SLF001 - no public one
        own: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False, remove_duplicate=False)]
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        own += [(name, buffer) for name, buffer in buffers if name not in transient]
        for name, tensor in own:
            yield joined(unwrapped, name), tensor, orders.get(name)


def _whole(tensor: Tensor, order: RowOrder | None) -> Tensor:
    whole = tensor.detach()
    if is_dtensor(whole):
        # Offloaded shards lie in CPU memory, where the mesh of a GPU cannot gather them.
        whole = whole.to(whole.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return whole if order is None else order.undealt(whole)


# -- Coordinates of the unsharded model --------------------------------------------------------------


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
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    along: list[Placement] = []  # each placement as it cuts this dim alone
    for placement in tensor.placements:
        if placement.is_partial():
            raise ValueError(f"a tensor with the placement {placement} is a term of a sum: redistribute it first")
        if placement.is_replicate() or getattr(placement, "dim", dim) % tensor.ndim != dim:
            along.append(Replicate())
        elif (split_factor := getattr(placement, "split_factor", None)) is not None:
            strided: Any = type(placement)
            along.append(strided(0, split_factor=split_factor))
        else:
            along.append(Shard(0))
    # DTensor itself cuts, since how it cuts uneven and strided dims is its own affair; without a source rank it sends
    # nothing.
    mesh = tensor.device_mesh
    return distribute_tensor(whole.to(mesh.device_type), mesh, along, src_data_rank=None).to_local().cpu()


def _runs(indices: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, how many, where in the list) of each run of consecutive numbers."""
    start = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield indices[start], at - start, start
            start = at
