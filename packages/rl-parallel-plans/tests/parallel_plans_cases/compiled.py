"""Layers under torch.compile, as a trainer compiles them: what one rank finds."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import rl_parallel_plans as plans
from parallel_plans_cases.cases import gradient_errors, total_loss
from parallel_plans_cases.models import tiny, token_ids


def sharded(architecture, mesh, *, compiled, sequence_parallel, **changes):
    model = tiny(architecture, **changes)
    plan = plans.plan_for(model, tp=mesh["tp"].size(), sequence_parallel=sequence_parallel)
    plans.apply_tensor_parallel(model, mesh, plan)
    for layer in model.model.layers if compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def beside_others(architecture="llama"):
    """Gradient errors of a compiled sequence-parallel model that is not the first on its mesh, nor the first mesh."""
    ids = token_ids(2, 9)
    reference = tiny(architecture)
    total_loss(reference, ids).backward()
    errors = []
    meshes = [init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp")) for _ in range(2)]
    for mesh, sequence_parallel, compiled in (
        (meshes[0], False, False),
        (meshes[0], True, False),
        (meshes[0], True, True),
        (meshes[0], False, True),
        (meshes[1], True, True),
    ):
        model = sharded(architecture, mesh, sequence_parallel=sequence_parallel, compiled=compiled)
        total_loss(model, ids).backward()
        errors.append(max(gradient_errors(model, reference).values()))
    return errors


def collectives(architecture="llama", *, sequence_parallel=False):
    """Of one layer: those of four less those of three, counted where they reach the process group."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    counts = []
    for num_layers in (3, 4):
        model = sharded(
            architecture, mesh, compiled=True, sequence_parallel=sequence_parallel, num_hidden_layers=num_layers
        )
        total_loss(model, token_ids(2, 8)).backward()  # compiles
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            total_loss(model, token_ids(2, 8)).backward()
        counts.append(sum(event.count for event in profiled.key_averages() if event.key.startswith("c10d::")))
    return counts[1] - counts[0]
