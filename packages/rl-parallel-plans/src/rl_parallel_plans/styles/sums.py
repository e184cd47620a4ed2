"""The two halves of a sum over ranks: of values forward, of gradients backward. On plain tensors."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sum_over_ranks(term: Tensor, mesh: "DeviceMesh") -> Tensor:
    """The sum of each rank's `term`, whose gradient each term takes as it is.

    A tensor of its own, where DTensor's `to_local` is a view that a model must not change in place.
    """
    whole: Tensor = _SumOverRanks.apply(term, mesh.get_group())  # type: ignore[no-untyped-call]
    return whole


def with_summed_gradient(whole: Tensor, mesh: "DeviceMesh") -> Tensor:
    """What every rank holds whole, its gradient the sum of all ranks'."""
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, term: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A functional collective: selective checkpointing sees it, and saves its result.
        reduced = funcol.all_reduce(term.contiguous(), "sum", group)
        whole: Tensor = funcol.wait_tensor(reduced)  # type: ignore[no-untyped-call]
        return whole

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
