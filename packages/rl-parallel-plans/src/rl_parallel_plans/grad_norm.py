"""The norm of a gradient whose parameters lie on different meshes, and clipping by it.

Some parameters are plain, some sharded over dp, some over dp and tp: torch's own norm refuses the mixture. Each entry
of the gradient counts once: a sharded piece on its own rank, a whole copy on one of the ranks that hold it.

    norm = (sum over groups of all_reduce over the group's sharded axes of (sum of |g|^p))^(1/p)

A group is the parameters with the same mesh and the same sharded axes: one small all-reduce per sharded axis of each.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_parallel_plans.dtensor import is_dtensor, to_local_if_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group = tuple["DeviceMesh | None", tuple[bool, ...]]


@torch.no_grad()
def get_grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The `norm_type`-norm of all gradients as one vector: a 0-dim fp32 tensor, equal on every rank.

    parameters: any mixture of plain tensors and DTensors on any meshes; those without a gradient count nothing. Every
        rank of the meshes must call with the same parameters: it is a collective.
    norm_type: above 0; `inf` for the largest absolute entry. Raises ValueError otherwise.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be above 0, or inf")
    parameters = list(parameters)
    device = to_local_if_dtensor(parameters[0]).device if parameters else None
    groups: dict[Group, list[Tensor]] = {}
    for parameter in parameters:
        # A rank without this gradient must still take part in its group's collectives.
        pieces = groups.setdefault(_group(parameter), [])
        if (gradient := _local_gradient(parameter)) is not None and gradient.numel():
            pieces.append(gradient)
    powers = [_reduced(_power(pieces, norm_type, device), group, norm_type) for group, pieces in groups.items()]
    if not powers:
        return torch.zeros((), device=device)
    total = torch.stack(powers)
    return total.amax() if math.isinf(norm_type) else total.sum() ** (1.0 / norm_type)


@torch.no_grad()
def clip_grad_by_total_norm_(parameters: Iterable[Tensor], max_norm: float, total_norm: Tensor | float) -> None:
    """Scale every gradient in place, in its own dtype, by `min(1, max_norm / total_norm)`.

    total_norm: from `get_grad_norm`, the same on every rank. Not finite, it makes the gradients not finite: look at
        the norm before the step. Needs no collective and does not wait for the device.
    """
    gradients = [to_local_if_dtensor(p.grad) for p in parameters if p.grad is not None]
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), same in by_kind.items():
        norm = torch.as_tensor(total_norm, dtype=torch.float32, device=device)
        # 1e-6 as in torch.nn.utils.clip_grad_norm_: a norm of zero is not a division by zero.
        torch._foreach_mul_(same, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _group(parameter: Tensor) -> Group:
    if not is_dtensor(parameter):
        return None, ()
    # Not `is_shard()`: under FSDP over TP the placement is a _StridedShard, which denies being a shard.
    return parameter.device_mesh, tuple(not placement.is_replicate() for placement in parameter.placements)


def _local_gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None or not is_dtensor(gradient):
        return gradient
    if is_dtensor(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _power(pieces: list[Tensor], norm_type: float, device: torch.device | None) -> Tensor:
    if not pieces:
        return torch.zeros((), device=device)
    dtype = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
    norms = torch.stack(torch._foreach_norm(pieces, norm_type, dtype=dtype)).float()  # noqa: SLF001 - no public one
    return norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()


def _reduced(power: Tensor, group: Group, norm_type: float) -> Tensor:
    mesh, sharded = group
    if mesh is None:
        return power
    import torch.distributed as dist

    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis in (axis for axis, is_sharded in enumerate(sharded) if is_sharded and mesh.size(axis) > 1):
        dist.all_reduce(power, op=operation, group=mesh.get_group(axis))
    return power
