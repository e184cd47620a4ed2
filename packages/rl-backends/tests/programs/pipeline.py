"""The ranks of a distributed test: two pipeline stages step, save, resume, load, fail. Started by test_pipeline.py."""

import functools
import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parent.with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def backend_of(model, config):
    from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

    config = DTensorConfig(**config)
    of_folder = isinstance(model, Path)
    backend = DTensorBackend.from_pretrained(str(model), config) if of_folder else DTensorBackend(model, config)
    backend.start_training(OptimizerConfig(**OPTIMIZER), num_steps=4)
    return backend


def step(world, backend, examples):
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    return backend.forward_backward(examples, loss), backend.optim_step()


def failing_loss(logp, examples):
    raise ZeroDivisionError("no rewards")


def main(task):
    torch.set_num_threads(1)
    world, folder = load_world(), Path(task["folder"])
    from rl_backends import RankError

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=task["rank"], world_size=2)
    examples, config = world.make_examples(), task["config"]
    make = functools.partial(world.make_model, "Qwen3", tie_word_embeddings=True)

    backend = backend_of(make(), config)
    sums, norm = step(world, backend, examples)
    backend.save_checkpoint(folder / "checkpoint")
    step(world, backend, examples)
    backend.save_pretrained(folder / "went-on")
    read = {"logp": backend.logp(examples), "entropy": backend.entropy(examples)}
    read["topk"] = backend.topk_logits(examples, 3).logp
    try:
        backend.forward_backward(examples, failing_loss)
    except (RankError, ZeroDivisionError) as error:
        read["failed"] = f"{type(error).__name__}: {error}"
    backend.save_pretrained(folder / "after-failure")
    torch.save({**read, "sums": sums, "norm": norm}, folder / f"{task['rank']}.pt")
    backend.close()

    resumed = backend_of(make(seed=1), config)
    resumed.load_checkpoint(folder / "checkpoint")
    step(world, resumed, examples)
    resumed.save_pretrained(folder / "resumed")
    resumed.close()

    loaded = backend_of(folder / "went-on", config)
    loaded.save_pretrained(folder / "loaded")
    loaded.close()
    dist.barrier()
    dist.destroy_process_group()
