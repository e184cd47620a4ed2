"""One of four ranks: what a layout says of real DTensors against what each rank's memory holds; prints `ok`."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rl_refit.errors import RefitError
from rl_refit.layout import Layout, Region

torch.set_num_threads(1)
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=4)
cases = []


def check(full, placed):
    """Every element that this rank's memory holds, in its place, and nothing else."""
    shape = tuple(full.shape)
    local = placed.to_local().detach() if isinstance(placed, DTensor) else placed
    boxes = Layout.from_tensor(placed).regions("w", shape)[rank]
    assert sum(box.numel for box in boxes) == local.numel(), (boxes, local.shape)
    for box in boxes:
        assert torch.equal(full[box.index_within(Region("w", (0,) * len(shape), shape))], local), (placed, boxes)
    cases.append(shape)


def indices(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


# Any placements of any mesh, uneven and empty pieces too.
SHAPES = [(5, 3), (1, 4), (0, 2), (8, 6), (7,), (3, 5, 2)]
for mesh_shape in [(4,), (2, 2), (4, 1), (1, 4), (1, 2, 2)]:
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape in SHAPES:
        choices = [Replicate(), *map(Shard, range(min(2, len(shape))))]
        for first in choices:
            for second in choices:
                placements = [*[Replicate()] * (len(mesh_shape) - 2), first, second][-len(mesh_shape) :]
                check(indices(*shape), distribute_tensor(indices(*shape), mesh, placements))


# FSDP2, over a module whose sizes no mesh divides, and over tensor parallelism, which strides what both cut.
class Block(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.norm = nn.LayerNorm(hidden)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = indices(*parameter.shape) + 1000 * number


def sharded(hidden, inner, mesh, *, fsdp, tp=None):
    block = Block(hidden, inner)
    full = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    if tp is not None:
        parallelize_module(block, mesh[tp], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh[fsdp])
    return full, block


flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
strided = 0
for hidden, inner in [(8, 16), (6, 10), (5, 3), (3, 1)]:
    modules = [sharded(hidden, inner, flat, fsdp="dp"), sharded(hidden, inner, hybrid, fsdp=("replicate", "shard"))]
    modules.append(sharded(hidden, inner, square, fsdp="dp", tp="tp"))
    modules.append(sharded(hidden, inner, cube, fsdp=("replicate", "shard"), tp="tp"))
    for full, block in modules:
        for name, parameter in block.named_parameters():
            check(full[name], parameter)
            strided += "_Strided" in repr(parameter.placements)
assert strided >= 8, strided

# A tensor that is no DTensor is this rank's own, whole.
check(indices(3, 2), indices(3, 2))
assert Layout.from_tensor(indices(2)) == Layout.whole(rank)

# What a layout cannot say, or a tensor does not keep, is refused.
partial = DTensor.from_local(indices(2, 2), square, [Partial(), Replicate()])
with pytest.raises(RefitError, match=r"not Partial\(sum\)"):
    Layout.from_tensor(partial)
ragged = DTensor.from_local(indices(1 + rank), flat, [Shard(0)], shape=(10,), stride=(1,))
if rank != 2:
    with pytest.raises(RefitError, match=rf"holds \[{1 + rank}\] on rank {rank}, and its placements promise"):
        Layout.from_tensor(ragged)
dist.barrier()
dist.destroy_process_group()
print(len(cases), "ok", flush=True)
os._exit(0)  # a thread of gloo that frees the barrier's tensor while Python ends would abort (torch 2.13)
