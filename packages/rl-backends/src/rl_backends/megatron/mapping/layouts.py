"""How Megatron cuts and fuses tensors, as boxes: rows or columns over tensor-parallel ranks, q, k and v group by group.

Pure arithmetic. Letters: r this rank, n ranks; H hidden, I intermediate, d head_dim.

    linear_qkv    for each group of query heads that share a key head: its q rows, its k rows, its v rows
    linear_fc1    this rank's rows of gate, then those of up
"""

from collections.abc import Sequence

from rl_parallel_plans import Box

__all__ = ["columns", "expert", "qkv", "rows", "vocabulary", "whole"]

Shape = tuple[int, ...]


def whole(shape: Shape) -> tuple[Box, ...]:
    """Not cut."""
    zeros = (0,) * len(shape)
    return (Box(offsets=zeros, sizes=shape, local_offsets=zeros),)


def rows(shape: Shape, *, rank: int, num_ranks: int, at: int = 0) -> tuple[Box, ...]:
    """Equal shares of the rows, this rank's from row `at` of its parameter."""
    size = shape[0] // num_ranks
    return (_rows(shape, start=rank * size, size=size, at=at),)


def columns(shape: Shape, *, rank: int, num_ranks: int) -> tuple[Box, ...]:
    """Equal shares of the columns of a matrix."""
    size = shape[1] // num_ranks
    return (Box(offsets=(0, rank * size), sizes=(shape[0], size), local_offsets=(0, 0)),)


def vocabulary(shape: Shape, *, rank: int, num_ranks: int) -> tuple[Box, ...]:
    """Rows of an embedding: shares of ceil(V / n) words, of which the last ranks have fewer, or none."""
    share = -(-shape[0] // num_ranks)
    size = min(share, max(0, shape[0] - rank * share))
    return (_rows(shape, start=rank * share, size=size, at=0),) if size else ()


def qkv(which: str, shape: Shape, *, heads_per_group: int, head_dim: int, groups: Sequence[int]) -> tuple[Box, ...]:
    """This rank's rows of a projection.

    which: "q", "k" or "v".
    groups: of key heads, those of this rank, in the order of its parameter.
    """
    block = (heads_per_group + 2) * head_dim
    first = {"q": 0, "k": heads_per_group, "v": heads_per_group + 1}[which] * head_dim
    size = heads_per_group * head_dim if which == "q" else head_dim
    return tuple(
        _rows(shape, start=group * size, size=size, at=place * block + first) for place, group in enumerate(groups)
    )


def expert(shape: Shape, index: int) -> tuple[Box, ...]:
    """One expert's matrix, whole, of a stack of them."""
    return (Box(offsets=(index, 0, 0), sizes=(1, *shape[1:]), local_offsets=(0, 0, 0)),)


def _rows(shape: Shape, *, start: int, size: int, at: int) -> Box:
    zeros = (0,) * (len(shape) - 1)
    return Box(offsets=(start, *zeros), sizes=(size, *shape[1:]), local_offsets=(at, *zeros))
