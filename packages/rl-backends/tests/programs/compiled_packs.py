"""The ranks of a distributed test: how many graphs packs compile where ranks share rows. Started by test_kernels.py."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parent.with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def main(task):
    torch.set_num_threads(1)
    from torch._dynamo.utils import counters

    from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # generating code takes a minute
    world, folder = load_world(), Path(task["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=task["rank"], world_size=2)
    config = DTensorConfig(context_parallel_size=2, sequence_packing=True, micro_batch_tokens=64, compile=True)
    backend = DTensorBackend(world.make_model("Llama"), config)
    backend.start_training(OptimizerConfig(lr=1e-4), num_steps=6)
    compiled = []
    for rows in (6, 4, 7, 5):
        examples = world.make_examples(rows=rows, seed=rows)
        backend.forward_backward(examples, lambda logp, rows: (-(logp * rows.trainable).sum(), {}))
        backend.optim_step()
        compiled.append(counters["stats"]["unique_graphs"])
    backend.close()
    dist.destroy_process_group()
    (folder / f"{task['rank']}.json").write_text(json.dumps(compiled))
