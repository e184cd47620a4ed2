"""Which tokens of a sequence lie on which rank of the context-parallel axis.

Knows tensors and one axis of a mesh; nothing of models or attention.

A sequence of T tokens is cut into 2·cp chunks, and rank r of cp holds chunks r and 2·cp − 1 − r, in this order. Under a
causal mask chunk c attends to c + 1 chunks, so that every rank attends to 2·cp + 1 and none waits for another: the
head-tail layout of Llama 3 (arXiv:2407.21783, 3.3.2). Everything with a token dim is sharded alike: ids, positions,
targets, masks.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_parallel_plans.dtensor import submesh
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


def shard_sequence(
    tensor: Tensor, mesh: "DeviceMesh", *, cp_axis: str = "cp", dim: int = 1, pad_value: float | None = None
) -> Tensor:
    """This rank's tokens of `tensor`, the same on every rank: [B, T, ...] to [B, T / cp, ...], T being dim `dim`.

    pad_value: what fills the end up to a multiple of 2·cp tokens. No token before the padding sees it under a causal
        mask; the loss must leave it out. None refuses a length that would need padding.

    Targets are shifted BEFORE they are sharded, since the next token may lie on another rank. Differentiable.
    Raises PlanError where the axis is missing or 2·cp does not divide the length.
    """
    cp_mesh = submesh(mesh, cp_axis)
    tensor = _padded(tensor, 2 * cp_mesh.size(), dim=dim, pad_value=pad_value)
    head, tail = own_chunks(cp_mesh)
    chunks = tensor.chunk(2 * cp_mesh.size(), dim)
    return torch.cat([chunks[head], chunks[tail]], dim)


def unshard_sequence(
    tensor: Tensor, mesh: "DeviceMesh", *, cp_axis: str = "cp", dim: int = 1, length: int | None = None
) -> Tensor:
    """The whole sequence, on every rank, from each rank's tokens of it: [B, T / cp, ...] to [B, T, ...].

    length: tokens to keep, which drops the padding of `shard_sequence`; None keeps all.

    Differentiable for a loss that EVERY rank computes from the whole: a rank takes the gradient of its own tokens, so
    that the loss counts once in gradients that are summed over the axis. Raises PlanError where the axis is missing or
    the shard is not two chunks.
    """
    from torch.distributed.tensor import Replicate

    whole = gather_sequence(tensor, submesh(mesh, cp_axis), dim=dim, gradient=Replicate())
    return whole if length is None else whole.narrow(dim, 0, length)


def sequence_positions(
    length: int, mesh: "DeviceMesh", *, cp_axis: str = "cp", device: torch.device | str | None = None
) -> Tensor:
    """Positions of this rank's tokens in a sequence of `length` tokens, padding included: int64 [1, T / cp].

    What the model takes as `position_ids`. `device`: the mesh's, unless given. Raises PlanError where the axis is
    missing.
    """
    cp_mesh = submesh(mesh, cp_axis)
    cp = cp_mesh.size()
    return chunk_positions(-(-length // (2 * cp)), cp_mesh, device or mesh.device_type)


def chunk_positions(chunk: int, cp_mesh: "DeviceMesh", device: torch.device | str) -> Tensor:
    """Positions of this rank's two chunks of `chunk` tokens: int64 [1, 2·chunk]."""
    within = torch.arange(chunk, device=device)
    return torch.cat([within + number * chunk for number in own_chunks(cp_mesh)])[None]


def own_chunks(cp_mesh: "DeviceMesh") -> tuple[int, int]:
    """Numbers of the two chunks that this rank holds, of 2·cp."""
    rank = cp_mesh.get_local_rank()
    return rank, 2 * cp_mesh.size() - 1 - rank


def gather_sequence(tensor: Tensor, cp_mesh: "DeviceMesh", *, dim: int, gradient: "Placement") -> Tensor:
    """All tokens in their order from each rank's two chunks, in one all-gather.

    gradient: what each rank's gradient of the whole is. Partial(): a term of a sum, which a reduce-scatter makes.
        Replicate(): the same on every rank, of which each takes its part.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if tensor.shape[dim] % 2:
        raise PlanError(
            f"a shard of {tensor.shape[dim]} tokens is not two chunks of equal length: make it with shard_sequence"
        )
    first = tensor.movedim(dim, 0).contiguous()
    shards = DTensor.from_local(first, cp_mesh, [Shard(0)], run_check=False)
    whole = shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])
    chunks = whole.chunk(2 * cp_mesh.size())
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])]).movedim(0, dim)


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
