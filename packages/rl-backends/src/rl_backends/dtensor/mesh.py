"""The ranks of this run as a mesh; a lone process is a mesh of one. Axes of one rank are left out, but for dp and tp.

    pp              shares out the layers
    dp_replicate    copies of the shards (HSDP); rows of its own
    dp              parameters are sharded over it; rows of its own
    ep              shares the experts of a mixture; rows of its own
    cp              shares the tokens of each row
    tp              shares each matrix multiplication

Parameters are sharded over cp too: its ranks hold the same weights and gradients of their own tokens.
"""

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_backends.dtensor.config import DTensorConfig
from rl_backends.rank_agreement import once_per_process_group

AXES = ("pp", "dp_replicate", "dp", "ep", "cp", "tp")
FIELDS = {
    "pp": "pipeline_parallel_size",
    "dp_replicate": "data_parallel_replicate_size",
    "ep": "expert_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
"""What sizes an axis; dp has the ranks that are left."""
ROW_AXES = ("dp_replicate", "dp", "ep")
"""Axes each rank of which has rows of its own."""
ALWAYS = ("dp", "tp")
"""What sharding asks a mesh for, whatever its sizes."""


def make_mesh(config: DTensorConfig) -> DeviceMesh:
    """All ranks of the process group, arranged by the sizes in `config`: of the same sizes, the same mesh.

    Raises:
        ValueError: the ranks are not a multiple of the sizes.
    """
    num_ranks, given = dist.get_world_size(), {axis: int(getattr(config, field)) for axis, field in FIELDS.items()}
    product = math.prod(given.values())
    if num_ranks % product:
        named = " x ".join(f"{FIELDS[axis]}={size}" for axis, size in given.items() if size > 1)
        raise ValueError(
            f"{num_ranks} ranks cannot be cut into groups of {product} ({named}); start a multiple of {product} ranks, "
            f"or lower a size"
        )
    sizes = {axis: given.get(axis, num_ranks // product) for axis in AXES}
    # Each axis is a process group, with a thread of its own that wakes up a hundred times a second.
    needed = {axis: size for axis, size in sizes.items() if size > 1 or axis in ALWAYS}
    return once_per_process_group(
        (config.device, *needed.items()),
        lambda: init_device_mesh(config.device, tuple(needed.values()), mesh_dim_names=tuple(needed)),
    )


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Ranks of every axis, those that were left out too."""
    present = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return {axis: present.get(axis, 1) for axis in AXES}


def axis_of(mesh: DeviceMesh, axis: str) -> DeviceMesh | None:
    """The axis as a mesh; None where it has one rank."""
    return mesh[axis] if sizes_of(mesh)[axis] > 1 else None


def rows_of(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks that have rows of their own, as one axis."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in ROW_AXES)
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("rows")  # noqa: SLF001 - no public one


def sharding_axes(config: DTensorConfig) -> tuple[str, ...]:
    """The axes that parameters are sharded over as if they were one, those of one rank left out but for dp."""
    experts = ("ep",) if config.expert_parallel_size > 1 else ()
    tokens = ("cp",) if config.context_parallel_size > 1 else ()
    return ("dp", *experts, *tokens)
