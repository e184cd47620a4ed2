"""The ranks of this run as a mesh with the axes `dp` and `tp`; a lone process is a mesh of one."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["make_mesh"]


def make_mesh(*, device: str, tensor_parallel_size: int) -> DeviceMesh:
    """Arrange all ranks as (data parallel, tensor parallel). Joins the process group, or makes it where there is none.

    Under `torchrun` the group spans its ranks; otherwise it is this process alone, with no socket to the outside.

    Raises:
        ValueError: `cuda` is asked for and absent, or the ranks are not a multiple of `tensor_parallel_size`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device='cuda' was asked for, and torch sees no GPU here; choose device='cpu' "
            "(policy.dtensor_cfg.device in a recipe)"
        )
    if not dist.is_initialized():
        _init_process_group("nccl" if device == "cuda" else "gloo")
    num_ranks = dist.get_world_size()
    if num_ranks % tensor_parallel_size:
        raise ValueError(
            f"{num_ranks} ranks cannot be cut into groups of tensor_parallel_size={tensor_parallel_size}; "
            f"start a multiple of {tensor_parallel_size} ranks, or lower it"
        )
    shape = (num_ranks // tensor_parallel_size, tensor_parallel_size)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))


def _init_process_group(backend: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
