"""The process group of a run: torchrun's ranks, or this process alone. Knows no mesh."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["init_process_group"]


def init_process_group(device: str, *, timeout_s: float) -> None:
    """Join the ranks that `torchrun` has started, or make a group of one, with no socket to the outside.

    Args:
        device: "cuda" joins by NCCL too; tensors of the host go by gloo in any case.
        timeout_s: how long a rank waits for another before it gives up.
    """
    backend, timeout = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
