"""One of two ranks: the shards of an uneven FSDP2 module, and its refusal in process; prints `ok`."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rl_refit import Layout, ModuleSink, ModuleSource, Refit, RefitError, Region

torch.set_num_threads(1)
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)

# FSDP2 pads the shards of 3 rows to 2 and 2: what it yields is 2 and 1.
policy = nn.Linear(2, 3, bias=False)


fully_shard(policy, mesh=init_device_mesh("cpu", (2,)))
((region, shard),) = ModuleSource(policy).shards(["weight"])
assert region == Region("weight", (2 * rank, 0), (2 - rank, 2))
assert shard.shape == region.shape
assert ModuleSource(policy).manifest().by_name["weight"].layout == Layout.from_placements((2,), (0,))

engine = nn.Linear(2, 3, bias=False)
before = engine.weight.detach().clone()
with pytest.raises(RefitError, match=r"between one rank and one engine; the source spans ranks\s+\[0, 1\]"):
    Refit(ModuleSource(policy), ModuleSink(engine))(version=1)
assert torch.equal(engine.weight, before)
dist.barrier()
dist.destroy_process_group()
print("ok", flush=True)
os._exit(0)  # a thread of gloo that frees the barrier's tensor while Python ends would abort (torch 2.13)
