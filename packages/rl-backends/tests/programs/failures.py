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
    """A loss that raises at its second call, as `where` says: on rank 1 alone, or in backward on every rank."""
    calls = []

    def fails(logp, rows):
        calls.append(rows)
        if len(calls) == 2 and where == "loss of rank 1" and rank == 1:
            raise ZeroDivisionError("no rewards")
        if len(calls) == 2 and where == "backward of all":
            logp = FailsInBackward.apply(logp)
        return loss(logp, rows)

    return fails


def failing_layer(model):
    def fails(*_):
        raise FloatingPointError("in forward")

    return model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fails)


def attempt(backend, where, *, examples, loss, rank):
    """What was raised, and whether anything of a gradient is left."""
    handle = failing_layer(backend.model) if where == "forward of all" else None
    try:
        backend.forward_backward(examples, failing_loss(where, loss=loss, rank=rank))
        raised = "nothing"
    except Exception as error:  # noqa: BLE001 - what it was is the result
        raised = f"{type(error).__name__}: {error}"
    if handle is not None:
        handle.remove()
    return raised, [name for name, p in backend.model.named_parameters() if p.grad is not None]


def main(task):
    from rl_backends import DTensorBackend, DTensorConfig

    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=2)
    world = load_world()
    examples = world.make_examples(rows=7)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    results = {}
    for mesh, sizes in {"FSDP2": {}, "TP2": {"tensor_parallel_size": 2}, "CP2": {"context_parallel_size": 2}}.items():
        for where in ("loss of rank 1", "backward of all", "forward of all"):
            backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(micro_batch_size=2, **sizes))
            raised, left = attempt(backend, where, examples=examples, loss=loss, rank=task["rank"])
            backend.forward_backward(examples, loss)
            gradients = {name: full(parameter.grad) for name, parameter in backend.model.named_parameters()}
            results[f"{mesh}, {where}"] = {"raised": raised, "left": left, "gradients": gradients}
    torch.save(results, Path(task["folder"]) / f"rank{task['rank']}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
