"""A policy under FSDP2 on a mesh of one rank, refitted into a plain engine; asserts, and prints `ok`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rl_refit import Layout, ModuleSink, ModuleSource, Refit

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)  # 5 rows, an odd number to shard
        self.block = nn.Linear(4, 3, bias=False)
        self.out = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0, 4), requires_grad=False)
        self.register_buffer("scale", torch.rand(3), persistent=False)

    def forward(self, tokens):
        hidden = self.block(self.embed(tokens)) * self.scale.to(self.out.weight.dtype)
        return self.head(self.out(hidden))


def full(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors}


def assert_equal(policy, engine):
    mine, theirs = full(policy), full(engine)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh, half = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
policy, engine = Model(0), Model(1)
fully_shard(policy.block, mesh=mesh, mp_policy=half)
fully_shard(policy, mesh=mesh, mp_policy=half)
policy.scale.fill_(2.0)

manifest = ModuleSource(policy).manifest()
assert manifest.by_name["embed.weight"].layout == Layout.from_placements((1,), (0,))
assert manifest.by_name["head.weight"].tied_to == "embed.weight"
assert manifest.by_name["scale"].layout == Layout.whole(0)
((region, shard),) = ModuleSource(policy).shards(["embed.weight"])
assert shard.data_ptr() == policy.embed.weight.to_local().data_ptr()  # read in place

refit = Refit(ModuleSource(policy), ModuleSink(engine))
refit(version=1)
assert_equal(policy, engine)

# An optimizer step on the shards; the next refit brings it.
before = engine.embed.weight.detach().clone()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
policy(torch.tensor([[1, 2]])).sum().backward()
optimizer.step()
refit(version=2)
assert_equal(policy, engine)
assert not torch.equal(engine.embed.weight, before)

# A forward without backward leaves the root's gathered parameters, in bfloat16, in place of the shards.
with torch.no_grad():
    policy(torch.tensor([[1, 2]]))
assert policy.embed.weight.dtype == torch.bfloat16
assert refit(version=3).manifest_hash == manifest.hash()
assert_equal(policy, engine)
assert engine.embed.weight.dtype == torch.float32
print("ok", flush=True)
os._exit(0)  # a thread of gloo that frees a tensor while Python ends would abort (torch 2.13)
