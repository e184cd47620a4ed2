"""What ranks must agree on about gradients that are NaN or infinite: whether there are any, and in which parameters.

A rank that went on alone would wait for the others for ever, so each question is answered by all ranks of the
parameters' meshes together. Collectives: every rank must ask.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_parallel_plans import to_local_if_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree_that_finite", "nonfinite_gradients"]


@torch.no_grad()
def agree_that_finite(norm: Tensor, parameters: Iterable[Tensor]) -> tuple[float, bool]:
    """This rank's norm, and whether those of all ranks are finite. Waits for the device once.

    Ranks reduce the same norm from their own copies of what is replicated, and copies can differ by a fault.
    """
    failed = (~torch.isfinite(norm)).to(torch.float64)
    value, failures = torch.stack([norm.to(torch.float64), _sum_over_ranks(failed, parameters)]).tolist()
    return value, failures == 0


@torch.no_grad()
def nonfinite_gradients(parameters: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Names of the parameters whose gradient has a NaN or an infinity on any rank; the same on every rank."""
    finite = torch.ones((), dtype=torch.bool)
    flags = [
        (finite if each.grad is None else torch.isfinite(to_local_if_dtensor(each.grad)).all().cpu()).logical_not()
        for each in parameters.values()
    ]
    failures = _sum_over_ranks(torch.stack(flags).to(torch.float64), parameters.values()).tolist()
    return tuple(name for name, count in zip(parameters, failures, strict=True) if count)


def _sum_over_ranks(counts: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The sum over all ranks of the meshes that the parameters lie on; a rank may count more than once."""
    meshes: dict[DeviceMesh, None] = {each.device_mesh: None for each in parameters if isinstance(each, DTensor)}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for mesh in meshes:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    if not groups:
        return counts
    device = next(iter(meshes)).device_type
    total = counts.to(device, copy=True)
    for group in groups.values():
        dist.all_reduce(total, group=group)
    return total.to(counts.device)
