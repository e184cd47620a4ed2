"""One rank: runs cells of the table one after the other, and writes what each came to as a line of JSON.

Started by launch.py with one argument, a task in JSON. It also runs cells of one rank in the process of the tests.
"""

import dataclasses
import faulthandler
import functools
import itertools
import json
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parity import cases
from parity.problems import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, STEPS, WEIGHT_DECAY, trained_adapters
from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig  # before conftest, which would check all shapes
from rl_backends.dtensor import sharded_model

SIZES_OF_MESH = (
    "pipeline_parallel_size",
    "data_parallel_replicate_size",
    "expert_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
)

SMALLEST_SHARE = 1e-4
"""A gradient that is zero but for rounding has no size of its own: it counts as this share of the largest of all."""


def run_cell(cell, folder):
    """The outcome of a cell: the error of each quantity, or the words of the refusal. Other errors are raised."""
    started = time.process_time()
    try:
        with trained_adapters():
            backend = DTensorBackend(cell.problem.model(), DTensorConfig(**cell.config))
    except ValueError as error:
        return {"cell": cell.name, "refused": f"{type(error).__name__}: {error}"}
    optimizer = OptimizerConfig(
        lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
    )
    backend.start_training(optimizer, num_steps=STEPS, temperature=cell.problem.temperature)
    seen = watch(backend.model)
    found = train(backend, cell)
    truth = torch.load(folder / cell.problem.file, weights_only=True)
    figures, worst = compare(found, truth)
    return {
        "cell": cell.name,
        "figures": figures,
        "worst": worst,
        "held": held(backend.model),
        "read": seen[: len(seen) // (2 * STEPS)],
        "cpu_s": time.process_time() - started,
    }


def train(backend, cell):
    """The same quantities as `Problem.answer`, by the backend."""
    examples, loss = cell.problem.examples(), cell.problem.loss()
    found = {"logp": backend.logp(examples)}
    for step in range(STEPS):
        sums = {}
        for part in parts(examples, cell.calls):
            for name, value in backend.forward_backward(part, loss).items():
                sums[name] = sums.get(name, 0) + value
        gradients = whole(backend.model, of=lambda tensor: tensor.grad) if step == 0 else None
        norm = backend.optim_step()
        if step == 0:
            found |= {"sums": sums, "gradients": gradients, "norm": torch.tensor(norm)}
    return {**found, "weights": whole(backend.model, of=lambda tensor: tensor.detach())}


def parts(examples, calls):
    """Rows of uneven shares, as a step that is accumulated over several calls gets them."""
    edges = [len(examples.lengths) * number // calls for number in range(calls + 1)]
    for start, stop in itertools.pairwise(edges):
        fields = {field.name: getattr(examples, field.name)[start:stop] for field in dataclasses.fields(examples)}
        yield dataclasses.replace(examples, **fields)


def whole(model, *, of):
    """Every parameter's tensor in the unsharded model's coordinates, on every rank."""
    from rl_parallel_plans import named_shards, stage_info

    tensors = {}
    for shard in named_shards(model):
        tensor = of(shard.tensor)
        if tensor is None or not isinstance(shard.tensor, torch.nn.Parameter):
            continue
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if shard.row_order is not None:
            full = shard.row_order.undealt(full)
        tensors[shard.name] = full.clone()  # clipping scales in place
    if stage_info(model) is None:
        return tensors
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensors)
    return {name: tensor for each in gathered for name, tensor in each.items()}


def compare(found, truth):
    """By quantity: the largest error relative to the tensor's largest entry, and the tensor in which it is."""
    errors = {
        "logp": {"logp": relative(found["logp"], truth["logp"])},
        "sums": {name: relative(value, truth["sums"][name]) for name, value in found["sums"].items()},
        "norm": {"norm": relative(found["norm"], truth["norm"])},
    }
    for quantity in ("gradients", "weights"):
        if found[quantity].keys() >= truth[quantity].keys():  # a stage has a copy of a tied weight under its own name
            found[quantity] = {name: found[quantity][name] for name in truth[quantity]}
        if found[quantity].keys() != truth[quantity].keys():
            raise AssertionError(
                f"{quantity} of other names: {sorted(found[quantity].keys() ^ truth[quantity].keys())}"
            )
        least = SMALLEST_SHARE * max(tensor.abs().max() for tensor in truth[quantity].values())
        errors[quantity] = {
            name: relative(tensor, truth[quantity][name], least=least) for name, tensor in found[quantity].items()
        }
    worst = {quantity: max(each, key=each.__getitem__) for quantity, each in errors.items()}
    return {quantity: errors[quantity][name] for quantity, name in worst.items()}, worst


def relative(found, truth, *, least=0.0):
    """Largest difference over the largest entry; NaN counts as infinite."""
    truth = truth.to(torch.float64)
    scale = truth.abs().max().clamp(min=float(least))
    error = ((found.to(torch.float64) - truth).abs().max() / scale).item()
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is what differs from itself


def held(model):
    """Share of the parameters' elements that lies on this rank."""
    from rl_parallel_plans import named_shards

    shards = [shard for shard in named_shards(model) if isinstance(shard.tensor, torch.nn.Parameter)]
    return sum(shard.local.numel() for shard in shards) / sum(shard.tensor.numel() for shard in shards)


def watch(model):
    """Shapes of the tokens that the model reads, one after the other, as the list grows."""
    seen = []
    if not isinstance(getattr(model, "base_model", None), torch.nn.Module):
        return seen  # a pipeline stage
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: seen.append(list(given["input_ids"].shape)), with_kwargs=True
    )
    return seen


def main(task):
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # launch.py asks a rank that hangs where it is
    if task["trace_only"]:  # generating code takes a minute, and is torch's affair; graphs and autograd are the model's
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    share_meshes()
    dist.init_process_group(
        "gloo", init_method=f"file://{task['rendezvous']}", rank=task["rank"], world_size=task["ranks"]
    )
    todo = {cell.name: cell for cell in cases.whole()}
    with Path(task["outcomes"]).open("w") as outcomes:
        for name in task["cells"]:
            print(json.dumps({"cell": name}), file=outcomes, flush=True)  # what it died in, if it dies
            print(json.dumps(run_cell(todo[name], Path(task["folder"]))), file=outcomes, flush=True)
    dist.barrier()  # a rank that leaves early tears connections that another still reads
    dist.destroy_process_group()


def share_meshes():
    """Make each mesh once: every group of gloo has a thread that wakes up a hundred times a second, used or not."""
    make_mesh, made = sharded_model.make_mesh, {}

    def mesh_of(config):
        sizes = tuple(getattr(config, name) for name in SIZES_OF_MESH)
        if sizes not in made:
            made[sizes] = make_mesh(config)
        return made[sizes]

    sharded_model.make_mesh = mesh_of


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
