"""What one rank does where accelerate owns the loop, the data and FSDP2, and this package the tensor parallelism."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, total_loss, whole
from parallel_plans_cases.models import tiny, token_ids
from rl_parallel_plans.checkpoints import export_state_dict
from rl_parallel_plans.sharding.parallelize import apply_tensor_parallel, parallelize

TP = 2
ROWS = 4


def _accelerator():
    """accelerate takes its ranks from torchrun's variables."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for; the group is there already
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _with_fsdp2(accelerator, *, activation_checkpointing):
    """What `Accelerator(parallelism_config=..., fsdp_plugin=...)` does on GPUs; on a CPU it takes neither."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=activation_checkpointing,
    )
    config = ParallelismConfig(dp_shard_size=dist.get_world_size() // TP, tp_size=TP)
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin, accelerator.state.parallelism_config = plugin, config
    accelerator.state.device_mesh = config.get_device_mesh("cpu")
    config._validate_accelerator(accelerator)
    return accelerator


def accelerate_owns_fsdp(architecture, *, tied=False, activation_checkpointing=False):
    accelerator = _with_fsdp2(_accelerator(), activation_checkpointing=activation_checkpointing)
    mesh = accelerator.torch_device_mesh
    reference, model = tiny(architecture, tied=tied), tiny(architecture, tied=tied)
    apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=TP))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.parallelism_config.tp_size = 1  # applied already
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.parallelism_config.tp_size = TP
    return _steps(accelerator, mesh["dp_shard"], reference, model, optimizer, mean_over=mesh["dp_shard"].size())


def accelerate_owns_the_loop(architecture):
    """The model is not handed over; accelerate has no part in its gradients."""
    accelerator = _accelerator()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    reference, model = tiny(architecture), tiny(architecture)
    parallelize(model, mesh, plans.plan_for(model, tp=TP))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    return _steps(accelerator, mesh["dp"], reference, model, optimizer, mean_over=1)


def _steps(accelerator, dp_mesh, reference, model, optimizer, *, mean_over):
    ids, errors, norms = token_ids(ROWS, 9), {}, []
    truth_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        truth_optimizer.zero_grad()
        total_loss(reference, ids).backward()
        # accelerate's FSDP2 averages gradients over data-parallel ranks: times their number they are sums again.
        accelerator.backward(total_loss(model, ids.chunk(dp_mesh.size())[dp_mesh.get_local_rank()]) * mean_over)
        errors = {name: error(p.grad, _of(reference, name).grad) for name, p in model.named_parameters()}
        norms.append([plans.get_grad_norm(each.parameters()).item() for each in (model, reference)])
        clipped = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, reference)]
        norms.append([whole(norm).item() for norm in clipped])
        optimizer.step()
        truth_optimizer.step()
    exported = dict(export_state_dict(model, every_rank=True))
    return {
        "errors": errors,
        "norms": norms,
        "weights": {name: error(exported[name], _of(reference, name)) for name in exported},
        "names": sorted(exported.keys() ^ dict(reference.named_parameters()).keys()),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "class": type(model).__name__,
    }


def _of(reference, name):
    return reference.get_parameter(name.replace("_checkpoint_wrapped_module.", ""))


def rows_of_each_rank():
    """Which rows accelerate's loader gives to this rank: those of its tp group."""
    accelerator = _with_fsdp2(_accelerator(), activation_checkpointing=False)
    accelerator.parallelism_config.tp_size = 1
    loader = accelerator.prepare_data_loader(DataLoader(range(ROWS), batch_size=1))
    return [batch.tolist() for batch in loader]
