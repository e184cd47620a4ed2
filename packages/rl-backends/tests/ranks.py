"""One rank of a distributed test: train a few steps on gloo, write what came out. Started by test_ranks.py."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()  # clipping scales in place


def main(task):
    from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=task["ranks"])
    world = load_world()
    examples = world.make_examples(rows=task["rows"], kind=getattr(world, task["kind"]))
    loss = functools.partial(getattr(world, task["loss"]), num_tokens=examples.trainable.sum())
    backend = DTensorBackend(world.make_model(task["family"]), DTensorConfig(**task["config"]))
    backend.start_training(OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01), num_steps=3)
    logp = backend.logp(examples)
    sums = backend.forward_backward(examples, loss)
    gradients = {name: full(parameter.grad) for name, parameter in backend.model.named_parameters()}
    norm = backend.optim_step()
    for _ in range(2):
        backend.forward_backward(examples, loss)
        backend.optim_step()
    weights = {name: full(parameter.detach()) for name, parameter in backend.model.named_parameters()}
    backend.save_pretrained(Path(task["folder"]) / "saved")
    result = {"logp": logp, "sums": sums, "gradients": gradients, "norm": norm, "weights": weights}
    torch.save(result, Path(task["folder"]) / f"rank{task['rank']}.pt")
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
