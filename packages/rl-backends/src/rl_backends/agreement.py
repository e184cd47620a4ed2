"""Sums of all ranks, added up in one reduction. Nothing is pickled."""

from collections.abc import Mapping
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["add_up"]


def add_up(sums: Mapping[str, Tensor], group: dist.ProcessGroup, *, device: torch.device) -> dict[str, Tensor]:
    """Scalars by name, added over the ranks of `group`; float64, which counts every token.

    Raises:
        ValueError: the ranks have other names.
    """
    names = sorted(sums)
    together = dist.get_world_size(group) > 1
    if together:
        _require_same_names(names, group, device=device)
    if not names:
        return {}
    stacked = torch.stack([sums[name].to(torch.float64) for name in names])
    if together:
        dist.all_reduce(stacked, group=group)
    return dict(zip(names, stacked.unbind(), strict=True))


def _require_same_names(names: list[str], group: dist.ProcessGroup, *, device: torch.device) -> None:
    digest = crc32("\n".join(names).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if int(extremes[0]) != -int(extremes[1]):
        raise ValueError(
            f"ranks returned sums of different names, {names} here; a loss must return the same names for any rows"
        )
