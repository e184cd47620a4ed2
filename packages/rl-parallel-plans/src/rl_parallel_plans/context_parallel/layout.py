"""Which tokens of a sequence lie on which rank of the context-parallel axis.

A document of n tokens is padded to 2·cp equal chunks, and rank r of cp holds chunks r and 2·cp - 1 - r, in this order.
Under a causal mask chunk c attends to c + 1 chunks, so every rank attends to 2·cp + 1 and none waits for another: the
head-tail layout of Llama 3 (arXiv:2407.21783, 3.3.2). Everything with a token dim is sharded alike: ids, positions,
targets, masks.

A row is one document. A packed row is several, one after the other, and each is cut by itself (`cu_seqlens=`), which
keeps the ranks balanced whatever the lengths are; Megatron and Transformer Engine use the same layout. A packed row
may also be cut as if it were one document, without padding inside it, which is balanced only on average. The positions
that all ranks hold tell which of the two it is, and where documents begin: `layout_of_positions`.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class Run(NamedTuple):
    """Consecutive tokens of one document that lie on this rank."""

    length: int
    """Tokens in the run."""
    first: int
    """Where the document begins in the whole row."""
    end: int
    """Where the run ends in the whole row: its last token attends to tokens `first` to `end` - 1."""


class RowLayout(NamedTuple):
    """How a row of T tokens lies on the ranks."""

    runs: tuple[Run, ...]
    """What this rank holds, in its order."""
    pieces: tuple[int, ...]
    """Lengths of the pieces that the row consists of when the ranks' tokens are joined in the order of the ranks."""
    order: tuple[int, ...]
    """Number of the piece at each place of the row."""
    documents: tuple[int, ...]
    """Where each document ends in the row, padding included."""


def shard_sequence(
    tensor: Tensor,
    mesh: "DeviceMesh",
    *,
    cp_axis: str = "cp",
    dim: int = 1,
    pad_value: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return this rank's tokens of `tensor`, which is the same on every rank: [B, T, ...] to [B, T / cp, ...].

    Args:
        tensor: any tensor with a token dim.
        mesh: the mesh that has the axis `cp_axis`.
        cp_axis: name of the context-parallel axis.
        dim: the token dim.
        pad_value: fills the end of each document up to a multiple of 2·cp tokens. No token before the padding sees it
            under a causal mask; the loss must leave it out. None refuses a length that would need padding.
        cu_seqlens: of a packed row, [documents + 1]: where each document begins, and the end of the last. Each
            document is cut by itself. None: a row is one document.

    Shift targets BEFORE they are sharded, since the next token may lie on another rank. Differentiable.

    Raises:
        PlanError: the axis is missing, 2·cp does not divide a length and there is no pad_value, or `cu_seqlens` does
            not describe the tensor.
    """
    cp_mesh = submesh(mesh, cp_axis)
    cp = cp_mesh.size()
    head, tail = own_chunks(cp_mesh)
    held = []
    for document in torch.split(tensor, document_lengths(tensor.shape[dim], cu_seqlens), dim):
        chunks = _padded(document, 2 * cp, dim=dim, pad_value=pad_value).chunk(2 * cp, dim)
        held += [chunks[head], chunks[tail]]
    return torch.cat(held, dim)


def unshard_sequence(
    tensor: Tensor,
    mesh: "DeviceMesh",
    *,
    cp_axis: str = "cp",
    dim: int = 1,
    length: int | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return the whole sequence on every rank, from each rank's tokens of it: [B, T / cp, ...] to [B, T, ...].

    Args:
        tensor: this rank's tokens, as `shard_sequence` cuts them.
        mesh: the mesh that has the axis `cp_axis`.
        cp_axis: name of the context-parallel axis.
        dim: the token dim.
        length: tokens to keep, which drops the padding of `shard_sequence`; None keeps all.
        cu_seqlens: those that were given to `shard_sequence`; the padding of each document is dropped.

    Differentiable for a loss that EVERY rank computes from the whole: a rank takes the gradient of its own tokens, so
    that the loss counts once in gradients that are summed over the axis.

    Raises:
        PlanError: the axis is missing, or the shard is not what `shard_sequence` makes of such a sequence.
    """
    from torch.distributed.tensor import Replicate

    cp_mesh = submesh(mesh, cp_axis)
    if cu_seqlens is None:
        chunks, kept = [_half(tensor.shape[dim])], None if length is None else [length]
    else:
        kept = document_lengths(None, cu_seqlens)
        chunks = [-(-each // (2 * cp_mesh.size())) for each in kept]
        if 2 * sum(chunks) != tensor.shape[dim]:
            raise PlanError(
                f"a shard of {tensor.shape[dim]} tokens does not belong to cu_seqlens of documents of {kept} tokens, "
                f"of which a rank holds {2 * sum(chunks)}: make it with shard_sequence and the same cu_seqlens"
            )
    layout = layout_of_documents(chunks, cp_mesh.get_local_rank(), cp_mesh.size())
    whole = in_order(gather_tokens(tensor, cp_mesh, dim=dim, gradient=Replicate()), layout)
    if kept is not None:
        starts = (0, *layout.documents[:-1])
        whole = torch.cat([whole[start : start + each] for start, each in zip(starts, kept, strict=True)])
    return whole.movedim(0, dim)


def sequence_positions(
    length: int | Tensor | Sequence[int],
    mesh: "DeviceMesh",
    *,
    cp_axis: str = "cp",
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of this rank's tokens, padding included: int64 [1, T / cp].

    They are what the model takes as `position_ids`. `length` is the number of tokens of a row, or the `cu_seqlens` of a
    packed one, whose positions restart at 0 with each document. `device` defaults to the mesh's.

    Raises PlanError where the axis is missing.
    """
    cp_mesh = submesh(mesh, cp_axis)
    lengths = [length] if isinstance(length, int) else document_lengths(None, length)
    chunks = [-(-each // (2 * cp_mesh.size())) for each in lengths]
    return _positions(chunks, own_chunks(cp_mesh)).to(device or mesh.device_type)[None]


def own_chunks(cp_mesh: "DeviceMesh") -> tuple[int, int]:
    """Numbers of the two chunks of a document that this rank holds, of 2·cp."""
    rank = cp_mesh.get_local_rank()
    return rank, 2 * cp_mesh.size() - 1 - rank


def document_lengths(length: int | None, cu_seqlens: Tensor | Sequence[int] | None) -> list[int]:
    """Tokens of each document of a row of `length` tokens; without `cu_seqlens`, the row itself is the only one."""
    if cu_seqlens is None:
        assert length is not None
        return [length]
    ends = [int(end) for end in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    lengths = [end - start for start, end in pairwise(ends)]
    if not lengths or ends[0] != 0 or min(lengths) < 1:
        raise PlanError(
            f"cu_seqlens is {ends}: it is 0, then where each document of the packed row ends, so that every document "
            "has a token"
        )
    if length is not None and ends[-1] != length:
        raise PlanError(f"cu_seqlens ends at {ends[-1]} and the row has {length} tokens: they must be equal")
    return lengths


def layout_of_documents(chunks: Sequence[int], rank: int, cp: int) -> RowLayout:
    """Documents of 2·cp chunks of `chunks[d]` tokens, each cut by itself; one document is a row that is not packed."""
    runs: list[Run] = []
    order: list[int] = []
    documents: list[int] = []
    first = 0
    for number, chunk in enumerate(chunks):
        runs += [Run(chunk, first, first + (held + 1) * chunk) for held in (rank, 2 * cp - 1 - rank)]
        heads = [2 * (len(chunks) * owner + number) for owner in range(cp)]  # rank by rank, two pieces a document
        order += [*heads, *(head + 1 for head in reversed(heads))]
        first += 2 * cp * chunk
        documents.append(first)
    pieces = [chunk for chunk in chunks for _ in range(2)] * cp
    return RowLayout(tuple(runs), tuple(pieces), tuple(order), tuple(documents))


def layout_of_positions(held: Tensor, rank: int) -> tuple[RowLayout, ...] | None:
    """Find the documents in the positions that the ranks hold: int64 [cp, B, T / cp] on the host, the same everywhere.

    Returns None where every row is one document, the layout of all rows where they are alike, else one for each row.

    Raises:
        PlanError: on every rank alike, for positions that no document has.
    """
    cp, _, tokens = held.shape
    if bool((held == _positions_of_all([_half(tokens)], cp)[:, None]).all()):
        return None
    alike = bool((held == held[:, :1]).all())
    rows = held[:, :1] if alike else held
    return tuple(_layout_of_row(rows[:, number], rank, number) for number in range(rows.shape[1]))


def _layout_of_row(held: Tensor, rank: int, number: int) -> RowLayout:
    """The layout of the row whose positions on each rank are `held`, [cp, T / cp].

    No row can be read in both ways: a document's second chunk on rank 0 does not continue its first, so that the first
    way finds a jump inside of a chunk unless the row is a single document, where the two ways are one.
    """
    cp, tokens = held.shape
    # Each document by itself: rank 0 holds the beginning of each.
    starts = (held[0] == 0).nonzero().flatten().tolist()
    sizes = [end - start for start, end in pairwise([*starts, tokens])]
    if starts[:1] == [0] and all(size % 2 == 0 for size in sizes):
        chunks = [size // 2 for size in sizes]
        if torch.equal(held, _positions_of_all(chunks, cp)):
            return layout_of_documents(chunks, rank, cp)
    # All of them as one.
    chunk = tokens // 2
    whole = layout_of_documents([chunk], rank, cp)
    row = in_order(held.flatten(), whole)
    restarts = row == 0
    if not bool(restarts[0]) or not bool((restarts[1:] | (row.diff() == 1)).all()):
        raise PlanError(
            f"position_ids of row {number}, {_shortened(held[rank])} on this rank, are not those of rows cut by "
            "shard_sequence, in which every document counts 0, 1, 2, ...: pass sequence_positions(length, mesh), or "
            "sequence_positions(cu_seqlens, mesh) for packed rows; padding on the left is not supported"
        )
    begins = restarts.nonzero().flatten().tolist()
    ends = [*begins[1:], len(row)]
    runs = []
    for held_chunk in (rank, 2 * cp - 1 - rank):
        start, stop = held_chunk * chunk, (held_chunk + 1) * chunk
        inside = [(begin, max(begin, start), min(end, stop)) for begin, end in zip(begins, ends, strict=True)]
        runs += [Run(last - at, begin, last) for begin, at, last in inside if last > at]
    return RowLayout(tuple(runs), whole.pieces, whole.order, tuple(ends))


def gather_tokens(tensor: Tensor, cp_mesh: "DeviceMesh", *, dim: int, gradient: "Placement") -> Tensor:
    """All ranks' tokens, joined in the order of the ranks, the token dim in front: one all-gather.

    gradient: what each rank's gradient of the whole is. Partial(): a term of a sum, which a reduce-scatter makes.
        Replicate(): the same on every rank, of which each takes its part.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    first = tensor.movedim(dim, 0).contiguous()
    shards = DTensor.from_local(first, cp_mesh, [Shard(0)], run_check=False)
    return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def in_order(gathered: Tensor, layout: RowLayout) -> Tensor:
    """Put tokens that are joined in the order of the ranks, [T, ...], into the order of the row."""
    pieces = torch.split(gathered, list(layout.pieces))
    return torch.cat([pieces[number] for number in layout.order])


def _positions(chunks: Sequence[int], numbers: tuple[int, int]) -> Tensor:
    """Positions of the chunks `numbers` of each document: int64 [2 · sum of chunks]."""
    return torch.cat([torch.arange(number * chunk, (number + 1) * chunk) for chunk in chunks for number in numbers])


def _positions_of_all(chunks: Sequence[int], cp: int) -> Tensor:
    return torch.stack([_positions(chunks, (rank, 2 * cp - 1 - rank)) for rank in range(cp)])


def _half(tokens: int) -> int:
    if tokens % 2:
        raise PlanError(f"a shard of {tokens} tokens is not two chunks of equal length: make it with shard_sequence")
    return tokens // 2


def _shortened(positions: Tensor) -> str:
    held = positions.tolist()
    return str(held) if len(held) <= 8 else f"[{', '.join(map(str, held[:4]))}, ..., {held[-1]}]"


def _padded(tensor: Tensor, chunks: int, *, dim: int, pad_value: float | None) -> Tensor:
    length = tensor.shape[dim]
    missing = -length % chunks
    if not missing:
        return tensor
    if pad_value is None:
        raise PlanError(
            f"a sequence of {length} tokens cannot be cut into 2·cp = {chunks} equal chunks: pass pad_value, which "
            f"adds {missing} token(s) at the end, or pad rows to a multiple of {chunks}"
        )
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim)
