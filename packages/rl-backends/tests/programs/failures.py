"""One rank of the tests of failures: something raises on one rank or on all, and then a step is made after all."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FloatingPointError("in backward")


def failing_loss(where, *, loss, rank):
    """A loss that goes wrong at its second call, as `where` says: on rank 1 alone, or in backward on every rank."""
    calls = []

    def fails(logp, rows):
        calls.append(rows)
        total, sums = loss(logp, rows)
        if len(calls) != 2:
            return total, sums
        if where == "backward of all":
            return FailsInBackward.apply(total), sums
        if rank == 1 and where == "loss of rank 1":
            raise ZeroDivisionError("no rewards")
        if rank == 1 and where == "detached on rank 1":
            return total.detach(), sums
        if rank == 1 and where == "shaped sum on rank 1":
            return total, {**sums, "rewards": rows.weight}
        return total, sums

    return fails


def failing_layer(model, where):
    """A hook on the first layer, whose backward comes last."""

    def fails(module, given, output):
        if where == "forward of all":
            raise FloatingPointError("in forward")
        if torch.is_grad_enabled():
            output.register_hook(lambda gradient: FailsInBackward.backward(None, gradient))

    return model.get_submodule("model.layers.0.mlp").register_forward_hook(fails)


def attempt(backend, where, *, examples, loss, rank):
    """What was raised, and whether anything of a gradient is left."""
    in_layer = where in {"forward of all", "deep in backward of all"}
    handle = failing_layer(backend.model, where) if in_layer else None
    try:
        backend.forward_backward(examples, failing_loss(where, loss=loss, rank=rank))
        raised = "nothing"
    except Exception as error:  # noqa: BLE001 - what it was is the result
        raised = f"{type(error).__name__}: {error}"
    if handle is not None:
        handle.remove()
    return raised, [name for name, p in backend.model.named_parameters() if p.grad is not None]


MESHES = {
    "FSDP2": {},
    "FSDP2, reduced last": {"reduce_gradients": "last_microbatch"},
    "HSDP": {"data_parallel_replicate_size": 2, "reduce_gradients": "last_microbatch"},
    "TP2": {"tensor_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}
EVERYWHERE = ("loss of rank 1", "backward of all", "deep in backward of all", "forward of all")
ONCE = ("detached on rank 1", "shaped sum on rank 1")


def nan_for_repeated_rows(logp, rows, *, rank):
    """Rank 1 has no row of its own, and repeats one."""
    total = logp.sum() / (1 - rank)
    return total, {"loss": total.detach()}


def main(task):
    from rl_backends import DTensorBackend, DTensorConfig

    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=2)
    world = load_world()
    examples = world.make_examples(rows=7)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    results = {}
    for mesh, sizes in MESHES.items():
        backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(micro_batch_size=2, **sizes))
        for where in (*EVERYWHERE, *(ONCE if mesh == "FSDP2" else ())):
            raised, left = attempt(backend, where, examples=examples, loss=loss, rank=task["rank"])
            backend.forward_backward(examples, loss)
            gradients = {name: full(parameter.grad) for name, parameter in backend.model.named_parameters()}
            backend.model.zero_grad()
            results[f"{mesh}, {where}"] = {"raised": raised, "left": left, "gradients": gradients}
    backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(micro_batch_size=2))
    one_row = world.make_examples(rows=1)
    sums = backend.forward_backward(one_row, lambda logp, rows: nan_for_repeated_rows(logp, rows, rank=task["rank"]))
    finite = all(bool(full(parameter.grad).isfinite().all()) for parameter in backend.model.parameters())
    results["repeated rows"] = {"finite": finite, "sums": {name: total.item() for name, total in sums.items()}}
    torch.save(results, Path(task["folder"]) / f"rank{task['rank']}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
