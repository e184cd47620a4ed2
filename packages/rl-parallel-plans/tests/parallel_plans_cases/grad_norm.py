"""Gradients placed in every way, their norm against that of the whole values."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rl_parallel_plans.sharding.grad_norm import clip_grad_by_total_norm_, get_grad_norm

SHAPE = (6, 5)


def values_of(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def parameter_with(value, layout, dtype=torch.float32):
    """A parameter whose gradient is `value`, placed by (mesh, placements), plain for None."""
    empty, value = torch.zeros(SHAPE, dtype=dtype), value.to(dtype)
    parameter = nn.Parameter(empty if layout is None else distribute_tensor(empty, *layout))
    parameter.grad = value.clone() if layout is None else distribute_tensor(value, *layout)
    return parameter


def partial_parameter(value, mesh, share):
    """Replicated, its gradient not yet summed: this rank has `share` of it."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros(SHAPE), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(value * share, mesh, [Partial()])
    return parameter


def mixture(*, norm_type, half):
    """Meshes (sub-meshes of one root, the root, its flattening, another root), dtypes, Partial, missing gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # its axes are over the same ranks
    flat = mesh["dp", "tp"]._flatten("all")
    layouts = [
        None,
        (mesh["tp"], [Shard(1)]),
        (mesh["dp"], [Shard(0)]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Shard(1), Shard(1)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(0), Replicate()]),
        (mesh, [Replicate(), Replicate()]),
        (mesh["tp"], [Replicate()]),
        (flat, [Shard(0)]),
        (other, [Shard(0), Shard(1)]),
        (other["tp"], [Shard(0)]),
    ]
    values = values_of(len(layouts) + 2)
    dtypes = [torch.bfloat16 if half and number % 2 else torch.float32 for number in range(len(layouts))]
    parameters = [parameter_with(*each) for each in zip(values, layouts, dtypes, strict=False)]
    share = [0.25, 0.75][mesh.get_local_rank("tp")]
    parameters += [partial_parameter(value, mesh["tp"], share) for value in values[-2:]]
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    dtypes += [torch.float32] * 2
    entries = torch.stack([value.to(dtype).double() for value, dtype in zip(values, dtypes, strict=True)])
    truth = torch.linalg.vector_norm(entries, norm_type).item()
    with CommDebugMode() as mode:
        norm = get_grad_norm(parameters, norm_type)
    clip_grad_by_total_norm_(parameters, 1.0, norm)
    return {
        "norm": norm.item(),
        "truth": truth,
        "clipped": get_grad_norm(parameters, norm_type).item(),
        "still_partial": str(parameters[-2].grad.placements),
        "collectives": {str(operation).split(".")[-1]: count for operation, count in mode.get_comm_counts().items()},
    }


def collectives_of_many(*, partial):
    """Forty parameters on four meshes: how many collectives their norm takes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = [(mesh["tp"], [Shard(1)]), (mesh["dp"], [Shard(0)]), (mesh, [Shard(0), Shard(1)]), None]
    parameters = [parameter_with(value, layouts[number % 4]) for number, value in enumerate(values_of(40))]
    if partial:
        parameters += [partial_parameter(value, mesh["tp"], 0.5) for value in values_of(9)]
    with CommDebugMode() as mode:
        get_grad_norm(parameters)
    return mode.get_total_counts()


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12, bias=False), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x))))


def fsdp_over_tp():
    """A model under FSDP2 over tensor parallelism, which places weights by _StridedShard, against the whole one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    reference = TwoLayers()
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    reference(x).square().mean().backward()
    model(x.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    truth = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reference.parameters()])).item()
    return {
        "placements": sorted({type(placement).__name__ for p in model.parameters() for placement in p.placements}),
        "norm": get_grad_norm(model.parameters()).item(),
        "truth": truth,
        "published": published_norm(model.parameters(), mesh),
    }


def replicated_over_dp():
    """Tensor parallelism without FSDP: half of the gradient sharded over tp, all of it replicated over dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = values_of(4)
    layouts = [(mesh["tp"], [Shard(0)])] * 2 + [None] * 2
    parameters = [parameter_with(*each) for each in zip(values, layouts, strict=True)]
    return {
        "norm": get_grad_norm(parameters).item(),
        "truth": torch.linalg.vector_norm(torch.stack(values)).item(),
        "published": published_norm(parameters, mesh),
    }


def published_norm(parameters, mesh):
    """Squares of all local gradients, summed over every axis, whether it cuts them or repeats them."""
    total = sum(
        (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).double().square().sum() for p in parameters
    )
    for axis in mesh.mesh_dim_names:
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total.sqrt().item()


def missing_on_one_rank():
    """A rank without a gradient that others have takes part in the same collectives."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    values = values_of(2)
    parameters = [parameter_with(value, (mesh, [Shard(0)])) for value in values]
    if dist.get_rank():
        parameters[1].grad = None
    mine = values[0].square().sum() + values[1][:3].square().sum()
    return [get_grad_norm(parameters).item(), mine.sqrt().item()]


def clip_in_bf16():
    """A sharded bf16 gradient is scaled itself, and not a copy of it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, dtype=torch.bfloat16), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.full((4,), 8.0, dtype=torch.bfloat16), mesh, [Shard(0)])
    norm = get_grad_norm([parameter])
    clip_grad_by_total_norm_([parameter], 4.0, norm)
    return [norm.item(), str(parameter.grad.dtype), parameter.grad.full_tensor().tolist()]
