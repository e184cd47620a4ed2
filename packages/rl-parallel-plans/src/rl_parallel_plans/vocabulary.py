"""Which words of a vocabulary this rank holds, when a mesh cuts it.

It knows placements, never logits. DTensor cuts ceil(V / ranks) words for each rank, so that the last ranks may hold
fewer, or none; `V // ranks` would be wrong by one word a rank wherever the division leaves a rest.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySlice:
    """The slice [start, start + size) of `total` words that this rank holds, and the group that holds them all."""

    start: int
    size: int
    total: int
    group: "dist.ProcessGroup | None"

    @property
    def is_cut(self) -> bool:
        """Whether other ranks hold the rest."""
        return self.group is not None

    def owned(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Targets as indices into the slice (0 where foreign), and which of them it owns."""
        index = targets - self.start
        mine = (index >= 0) & (index < self.size)
        return index.where(mine, 0), mine

    def sizes(self) -> list[int]:
        """Words of each rank of the group, in its order."""
        if self.group is None:
            return [self.size]
        share = -(-self.total // self.group.size())
        return [max(0, min(share, self.total - rank * share)) for rank in range(self.group.size())]


def local_slice(tensor: Tensor, *, dim: int, tp_axis: str, what: str) -> tuple[Tensor, VocabularySlice]:
    """This rank's piece of a tensor whose `dim` is the vocabulary, plain or cut over `tp_axis`, and which piece it is.

    A mesh of one rank may have any axes: nothing is cut.
    Raises PlanError for any other placement.
    """
    total, dim = tensor.shape[dim], dim % tensor.ndim
    if not is_dtensor(tensor):
        return tensor, VocabularySlice(start=0, size=total, total=total, group=None)
    local = tensor.to_local()
    if tensor.device_mesh.size() == 1:
        return local, VocabularySlice(start=0, size=total, total=total, group=None)
    require_axis(tensor, tp_axis=tp_axis, what=what)
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if placement.is_replicate():
        return local, VocabularySlice(start=0, size=total, total=total, group=None)
    if not placement.is_shard(dim):
        raise PlanError(f"{what} is placed {placement}: it may be Shard({dim}) or Replicate()")
    start = min(total, mesh.get_local_rank() * -(-total // mesh.size()))
    return local, VocabularySlice(start=start, size=local.shape[dim], total=total, group=mesh.get_group())


def require_axis(tensor: "DTensor", *, tp_axis: str, what: str) -> None:
    """Refuse a DTensor whose mesh has another axis than `tp_axis`, or more."""
    names = tensor.device_mesh.mesh_dim_names
    if names != (tp_axis,):
        raise PlanError(
            f"{what} lies on a mesh with the axes {names}, and its only axis may be {tp_axis!r}: under "
            "FSDP, call this in a forward of the wrapped model (torch.distributed.fsdp.register_fsdp_forward_method), "
            "where the parameter is gathered; a tp axis with another name is passed as tp_axis="
        )
