"""The order in which the rows of a fused weight are dealt to the ranks of the tp axis.

A fused weight ([q | k | v], [gate | up]) has to give every rank some rows of each segment, which no `Shard(dim)` of the
weight does. So a sharded one is registered in a shape of its own, in which it does:

    unsharded     [rows, ...]              [experts, rows, ...]
    registered    [rows / tp, tp, ...]     [experts, tp, rows / tp, ...]     Shard(1): the dim that counts ranks
    local         [rows / tp, 1, ...]      [experts, 1, rows / tp, ...]      a rank's rows, in the order of its forward

Every piece of it is a plain contiguous shard, so FSDP (which shards dim 0), optimizers and torch's distributed
checkpoints handle it as any other parameter. The shape differs from the unsharded one and from that at every other tp,
so whatever takes rows for those of another layout (an optimizer's state, for example) fails on the shape instead of
training on permuted rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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
        return rows.unflatten(self.dim, by_place.shape)

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
