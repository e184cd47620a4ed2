"""Sums of all ranks, added up in one reduction. Nothing is pickled."""

from collections.abc import Mapping
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["add_up"]


def add_up(sums: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Numbers by name, added over the ranks of `group`; float32.

    Raises:
        ValueError: the ranks have other names, or one of them is not a single number.
    """
    names = sorted(sums)
    if shaped := [name for name in names if sums[name].numel() != 1]:
        raise ValueError(f"the sums {shaped} that the loss returned are not single numbers; reduce them in the loss")
    if not names:
        return {}
    stacked = torch.stack([sums[name].detach().float().reshape(()) for name in names])
    if dist.get_world_size(group) > 1:
        _require_same_names(names, group, device=stacked.device)
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
