"""The ranks of a distributed test: shard models, put known gradients on them, step, write what came out.

The gradients are given and not computed, so that what is compared is the step alone, bit for bit. Started by
test_optimizer_ranks.py, which imports `known_gradient` to give one plain process the same ones.
"""

import importlib.util
import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parent.with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def known_gradient(name, shape, *, step):
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(shape, generator=generator)


def put_gradients(shards, *, step):
    """Each rank's part of the known gradients, in the order of rows that its shard has."""
    from torch.distributed.tensor import DTensor

    for shard in shards:
        whole = known_gradient(shard.name, shard.shape, step=step)
        local = torch.empty(shard.local.shape)
        for box in shard.boxes():
            box.of_local(local).copy_(box.of_whole(whole))
        if isinstance(shard.tensor, DTensor):
            if shard.row_order is not None:  # the dim that counts the ranks of tp
                local = local.unsqueeze(shard.row_order.ranks_dim)
            local = DTensor.from_local(
                local,
                shard.tensor.device_mesh,
                shard.tensor.placements,
                run_check=False,
                shape=shard.tensor.shape,
                stride=shard.tensor.stride(),
            )
        shard.tensor.grad = local


def parameter_shards(model):
    from rl_parallel_plans import named_shards

    return [each for each in named_shards(model) if isinstance(each.tensor, nn.Parameter)]


def sharded(world, task):
    from rl_parallel_plans import parallelize, plan_for

    dp, tp = task["mesh"]
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = world.make_model(task["family"], **task.get("model", {}))
    return parallelize(model, mesh, plan_for(model, tp=tp))


def whole_weights(model):
    from rl_parallel_plans import export_state_dict

    return {name: tensor.clone() for name, tensor in export_state_dict(model, every_rank=True)}


def take_steps(world, task):
    from rl_backends.optimizers import muon
    from rl_backends.optimizers.config import OptimizerConfig
    from rl_backends.optimizers.optimizers import clip_and_step, make_optimizers

    model, config = sharded(world, task), make_config(OptimizerConfig, task["optimizer"])
    orthogonalized, count = muon.orthogonalized, [0]

    def counted(matrix, *, dtype):
        count[0] += 1
        return orthogonalized(matrix, dtype=dtype)

    muon.orthogonalized = counted
    optimizers = make_optimizers(model, config, num_steps=3)
    shards, norms = parameter_shards(model), []
    # torchao compiles its step, a minute for every shape; what it computes is the same without.
    with torch.compiler.set_stance("force_eager" if config.name == "adamw_8bit" else "default"):
        for step in range(3):
            put_gradients(shards, step=step)
            norms.append(clip_and_step(model, optimizers, version=step).norm)
    muon.orthogonalized = orthogonalized
    return {
        "weights": whole_weights(model),
        "norms": norms,
        "orthogonalized": count[0],
    }


def make_config(kind, options):
    from rl_backends.optimizers.config import MuonConfig

    muon = {"muon": MuonConfig(**options["muon"])} if "muon" in options else {}
    return kind(**{**options, **muon})


def meet_a_nan(world, task):
    """A NaN in one entry that the last rank alone holds: what every rank does, and what has changed."""
    from rl_backends import errors
    from rl_backends.optimizers.config import OptimizerConfig
    from rl_backends.optimizers.optimizers import clip_and_step, make_optimizers
    from rl_parallel_plans import to_local_if_dtensor

    model = sharded(world, task)
    config = OptimizerConfig(lr=1e-2, on_nonfinite_gradient=task["on_nonfinite_gradient"])
    optimizers = make_optimizers(model, config, num_steps=3)
    shards = parameter_shards(model)
    put_gradients(shards, step=0)
    clip_and_step(model, optimizers, version=0)
    before = whole_weights(model), _state(optimizers), optimizers.learning_rate
    put_gradients(shards, step=1)
    if dist.get_rank() == dist.get_world_size() - 1:
        bad = next(each for each in shards if each.name == task["bad"])
        to_local_if_dtensor(bad.tensor.grad).flatten()[0] = torch.nan
    message, nonfinite = "", ()
    try:
        nonfinite = clip_and_step(model, optimizers, version=1).nonfinite
    except errors.NonFiniteGradientError as error:
        message = str(error)
    after = whole_weights(model), _state(optimizers), optimizers.learning_rate
    return {
        "message": message,
        "nonfinite": list(nonfinite),
        "skipped": optimizers.num_steps_skipped,
        "unchanged": _equal(before, after),
        "cleared": all(each.tensor.grad is None for each in shards),
    }


def step_after_a_forward(world, task):
    """A forward without a backward leaves weights gathered; the next forward must see the updated ones."""
    from rl_backends.optimizers.config import OptimizerConfig
    from rl_backends.optimizers.optimizers import clip_and_step, make_optimizers

    model, config = sharded(world, task).eval(), OptimizerConfig(lr=1e-2)
    optimizers = make_optimizers(model, config, num_steps=1)
    put_gradients(parameter_shards(model), step=0)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        model(input_ids=tokens)
        norm = clip_and_step(model, optimizers, version=0).norm
        return {"logits": model(input_ids=tokens).logits.clone(), "norm": norm}


def step_over_meshes(_, task):
    """One optimizer over parameters that are plain or lie on different meshes, as experts do."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from rl_backends.optimizers.config import OptimizerConfig
    from rl_backends.optimizers.optimizers import clip_and_step, make_optimizers

    ranks = dist.get_world_size()
    meshes = {
        "line": init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)),
        "grid": init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp")),
    }
    model = three_matrices()
    for name, mesh in meshes.items():
        whole = model[name].weight.detach()
        model[name].weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim))
    config = OptimizerConfig(lr=1e-2, implementation=task["implementation"])
    optimizers = make_optimizers(model, config, num_steps=1)
    put_gradients(parameter_shards(model), step=0)
    norm = clip_and_step(model, optimizers, version=0).norm
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    return {"weights": weights, "norm": norm, "groups": len(optimizers.groups)}


def three_matrices():
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 5, bias=False) for name in ("plain", "line", "grid")})


def _state(optimizers):
    from rl_parallel_plans import to_local_if_dtensor

    return [
        {name: to_local_if_dtensor(value).clone() for name, value in state.items()}
        for optimizer in optimizers.each
        for state in optimizer.state.values()
    ]


def _equal(one, other):
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


CLAIMS = {"steps": take_steps, "nan": meet_a_nan, "forward": step_after_a_forward, "meshes": step_over_meshes}


def main(task):
    """Import once, then fork a process for each rank."""
    torch.set_num_threads(1)
    world = load_world()
    import_beforehand(task["cases"].values())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(world, task, rank)) for rank in range(task["ranks"])]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


def import_beforehand(cases):
    import transformers

    for case in cases:
        getattr(transformers, f"{case['family']}ForCausalLM")


def run(world, task, rank):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['folder']}/rendezvous",
        rank=rank,
        world_size=task["ranks"],
        timeout=timedelta(seconds=120),
    )
    results = {name: CLAIMS[case["claim"]](world, case) for name, case in task["cases"].items()}
    torch.save(results, Path(task["folder"]) / f"rank{rank}.pt")
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
