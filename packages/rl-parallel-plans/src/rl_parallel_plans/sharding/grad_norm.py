"""The norm of a gradient whose parameters are on different meshes, and clipping by it.

Some parameters are plain, some sharded over dp, some over dp and tp: torch's own norm refuses the mixture. Each entry
of the gradient counts once: a sharded piece on its own rank, a whole copy on one of the ranks that hold it.

    norm = (sum over sets S of sharded axes of all_reduce over S of (sum of |g|^p))^(1/p)

The sums of all sets are in one vector, and an axis reduces the entries of the sets that have it: one all-reduce for
each sharded axis, however many parameters and meshes there are. Sub-meshes of one root share its axes; an axis is the
ranks along it, so that two meshes over the same ranks share theirs too.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_parallel_plans.dtensor import is_dtensor, to_local_if_dtensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Axis = tuple[int, ...]
"""The ranks along one axis of a mesh, through this one."""


@torch.no_grad()
def get_grad_norm(
    parameters: Iterable[Tensor], norm_type: float = 2.0, *, pp_mesh: "DeviceMesh | None" = None
) -> Tensor:
    """The `norm_type`-norm of all gradients as one vector: a 0-dim tensor, equal on every rank.

    parameters: any mixture of plain tensors and DTensors on any meshes, devices and dtypes; those without a gradient
        count nothing. Every rank of the meshes must call with the same parameters: it is a collective. A gradient
        that is still Partial is summed for the norm, all of them of an axis by one more all-reduce, and left as it is.
    norm_type: above 0; `inf` for the largest absolute entry. Raises ValueError otherwise.
    pp_mesh: mesh of one axis whose ranks hold other parameters each, the stages of a pipeline: the norm is that of all
        of them, by one more all-reduce. A parameter that two stages hold must be passed by one (`Pipeline.grad_norm`).

    Returns fp32, or fp64 where a parameter is fp64, on the device of the first parameter.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be above 0, or inf")
    parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
    if not parameters and pp_mesh is None:
        return torch.zeros(())
    device = to_local_if_dtensor(parameters[0]).device if parameters else torch.device("cpu")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    gradients = [p.grad for p in parameters]
    if any(is_dtensor(gradient) for gradient in gradients if gradient is not None):
        _place_as_parameters_(gradients, parameters)

    # This rank's pieces of the gradients, together with those that the same axes shard.
    groups: dict[Axis, dist.ProcessGroup] = {}
    pieces: dict[tuple[Axis, ...], list[Tensor]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # A rank without this gradient must still take part in its axes' collectives.
        same = pieces.setdefault(_sharded_axes(parameter, groups) if is_dtensor(parameter) else (), [])
        if gradient is not None and gradient.numel():
            same.append(gradient)

    # Of each set: the sum of |g|^p over this rank's pieces, or their largest |g|.
    # fp64 holds the square of every fp32 norm; Apple's GPUs do not have it.
    wide = torch.float32 if device.type == "mps" else torch.float64
    powers: dict[tuple[Axis, ...], Tensor] = {}
    for axes, same in pieces.items():
        by_device: dict[torch.device, list[Tensor]] = {}
        for piece in same:
            by_device.setdefault(piece.device, []).append(piece)
        norms = []
        for there in by_device.values():
            # fp32 at least; `wide` for powers that leave the range of fp32 sooner than 2 does.
            exact = norm_type in {1.0, 2.0, math.inf} and all(piece.dtype != torch.float64 for piece in there)
            each = torch._foreach_norm(there, norm_type, dtype=torch.float32 if exact else wide)  # noqa: SLF001 - no public one
            norms.append(torch.stack(list(each)).to(device=device, dtype=wide, non_blocking=device.type != "cpu"))
        if not norms:
            powers[axes] = torch.zeros((), device=device, dtype=wide)
            continue
        together = torch.cat(norms)
        powers[axes] = together.amax() if math.isinf(norm_type) else (together**norm_type).sum()

    for axis, group in groups.items():
        _reduce_({axes: power for axes, power in powers.items() if axis in axes}, group, norm_type)
    sums = torch.stack(list(powers.values())) if powers else torch.zeros(1, device=device, dtype=wide)
    total = sums.amax() if math.isinf(norm_type) else sums.sum()
    if pp_mesh is not None:
        _reduce_({(): total}, pp_mesh.get_group(), norm_type)
    return total.to(dtype) if math.isinf(norm_type) else total.pow(1.0 / norm_type).to(dtype)


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


def _sharded_axes(parameter: "DTensor", groups: "dict[Axis, dist.ProcessGroup]") -> tuple[Axis, ...]:
    """The axes that shard a parameter; the process group of each is added to `groups`."""
    import torch.distributed as dist

    mesh, axes = parameter.device_mesh, []
    for number, placement in enumerate(parameter.placements):
        # Not `is_shard()`: under FSDP over TP the placement is a _StridedShard, which denies being a shard.
        if placement.is_replicate() or mesh.size(number) == 1:
            continue
        group = mesh.get_group(number)
        axis = tuple(dist.get_process_group_ranks(group))
        groups.setdefault(axis, group)
        axes.append(axis)
    return tuple(axes)


def _reduce_(powers: dict[tuple[Axis, ...], Tensor], group: "dist.ProcessGroup", norm_type: float) -> None:
    """Reduce these numbers over one axis, all together, in place."""
    import torch.distributed as dist

    together = torch.stack(list(powers.values()))
    together = together.to(device_of_group(group, together.device))
    dist.all_reduce(together, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)
    for power, reduced in zip(powers.values(), together, strict=True):
        power.copy_(reduced)


def device_of_group(group: "dist.ProcessGroup", device: torch.device) -> torch.device:
    """`device`, or one that the group can reduce on: gradients offloaded to the CPU belong to a group of GPUs."""
    able = group._device_types  # noqa: SLF001 - no public one
    return device if device.type in {one.type for one in able} else able[0]


def _place_as_parameters_(gradients: list[Tensor | None], parameters: Sequence[Tensor]) -> None:
    """Replace each DTensor in `gradients` by its local tensor, once it is placed as its parameter is."""
    pending: dict[tuple[object, ...], list[tuple[int, DTensor, int]]] = {}
    for number, parameter in enumerate(parameters):
        gradient = gradients[number]
        if gradient is None:
            continue
        if is_dtensor(gradient) and is_dtensor(parameter):
            axis = _only_partial_axis(gradient, parameter)
            if axis is not None:
                key = (axis, gradient.device_mesh, gradient.dtype, gradient.to_local().device)
                pending.setdefault(key, []).append((number, gradient, axis))
            elif gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
        gradients[number] = to_local_if_dtensor(gradient)
    for same in pending.values():
        _, gradient, axis = same[0]
        group = gradient.device_mesh.get_group(axis)
        summed = _summed([one.to_local() for _, one, _ in same], group)
        for (number, _, _), whole in zip(same, summed, strict=True):
            gradients[number] = whole


def _only_partial_axis(gradient: "DTensor", parameter: "DTensor") -> int | None:
    """The axis over which a gradient is still to be added up, where that is all that it lacks."""
    differing = [
        (number, found)
        for number, (found, wanted) in enumerate(zip(gradient.placements, parameter.placements, strict=True))
        if found != wanted
    ]
    if len(differing) != 1:
        return None
    number, found = differing[0]
    is_sum = found.is_partial() and getattr(found, "reduce_op", None) == "sum"
    return number if is_sum and parameter.placements[number].is_replicate() else None


def _summed(pieces: list[Tensor], group: "dist.ProcessGroup") -> list[Tensor]:
    """The sums of pieces over ranks, by one all-reduce, in new tensors."""
    import torch.distributed as dist

    flat = torch.cat([piece.flatten() for piece in pieces])
    dist.all_reduce(flat, group=group)
    return list(torch.split(flat, [piece.numel() for piece in pieces]))
