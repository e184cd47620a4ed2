"""Collectives of one decoder layer, and the time of a step, of the plan by structure and of the usual ones.

    python benchmarks/collectives.py

Two ranks over gloo, a Llama of 4 layers; counts are those of 4 layers less those of 3, where they reach the process
group, also with each layer under torch.compile; times are the least CPU time of several steps taken in turn. "usual" is
torch's ColwiseParallel and RowwiseParallel on q, k, v, o, gate, up and down. Ends with one line of JSON.
"""

import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.profiler import ProfilerActivity, profile

import rl_parallel_plans as plans

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
ROWS, LENGTH, VOCABULARY, STEPS = 4, 128, 1024, 12


def usual(model):
    """What trainers write by hand."""
    layer = "model.layers.*"
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        **{f"{layer}.{name}": ColwiseParallel() for name in columns},
        **{f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


PLANS = {
    "usual": {"custom": usual},
    "by structure": {},
    "by structure, sequence parallel": {"sequence_parallel": True},
    "by structure, column-wise outputs": {"output_projections": "colwise"},
}


def sharded(num_layers, mesh, asked):
    """A Llama under one of the plans."""
    config = transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=num_layers, vocab_size=VOCABULARY, pad_token_id=None, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh.size(), **asked))


def step(model, ids):
    """Forward and backward of the sum of log-probabilities."""
    logits = model(input_ids=ids).logits
    plans.get_logprobs_from_vocab_parallel_logits(logits[:, :-1], ids[:, 1:]).sum().backward()


def counted(mesh, ids, asked, *, compiled=False):
    """Collectives of one layer."""
    counts = []
    for num_layers in (3, 4):
        model = sharded(num_layers, mesh, asked)
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        step(model, ids)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step(model, ids)
        counts.append(sum(event.count for event in profiled.key_averages() if event.key.startswith("c10d::")))
    return counts[1] - counts[0]


def rank(number, rendezvous, results):
    """One of the two ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    counts = {name: counted(mesh, ids, asked) for name, asked in PLANS.items()}
    compiled = {name: counted(mesh, ids, asked, compiled=True) for name, asked in PLANS.items() if name != "usual"}
    models = {name: sharded(4, mesh, asked) for name, asked in PLANS.items()}
    best = dict.fromkeys(PLANS, float("inf"))
    for _ in range(STEPS):
        for name, model in models.items():
            dist.barrier()
            start = time.process_time()
            step(model, ids)
            dist.barrier()
            best[name] = min(best[name], time.process_time() - start)
    if number == 0:
        for name in PLANS:
            figures = {"collectives": counts[name], "compiled": compiled.get(name)}
            results[name] = {**figures, "cpu_time": best[name] / best["usual"]}
    dist.destroy_process_group()


def main():
    """Print a table, and its figures as JSON."""
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(rank, (os.path.join(folder, "rendezvous"), results), nprocs=2)  # noqa: PTH118
        found = dict(results)
    print(f"{'plan':<36}{'collectives a layer':>20}{'compiled':>10}{'CPU of a step':>16}")
    for name, figures in found.items():
        print(f"{name:<36}{figures['collectives']:>20}{figures['compiled'] or '-':>10}{figures['cpu_time']:>16.2f}")
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **found}))


if __name__ == "__main__":
    main()
