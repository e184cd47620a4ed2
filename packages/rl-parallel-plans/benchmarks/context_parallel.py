"""What a token costs under context parallelism, against the plain model on one rank.

    python benchmarks/context_parallel.py

Two ranks over gloo, a Llama of 4 layers. Each case trains on the same tokens with cp=1 (one rank, while the other
waits) and with cp=2 in turn, several times, in one run. The cost of a step is the CPU time of all ranks together, the
least of its repetitions; the ratio is that of cp=2 to cp=1. The second figure is the larger share of the two ranks: 0.5
is perfectly balanced. Ends with one line of JSON.
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

import rl_parallel_plans as plans

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
VOCABULARY, LENGTH, STEPS = 1024, 2048, 4
CASES = {
    "one document": {"documents": [LENGTH]},
    "packed, each document by itself": {"documents": [1024, 512, 256, 128, 64, 64]},
    "packed, all documents as one": {"documents": [1024, 512, 256, 128, 64, 64], "cut_as_one": True},
    "window of 256": {"documents": [LENGTH], "window": 256},
}


def made(window):
    """A Llama, or a Mistral with a window."""
    name = "Llama" if window is None else "Mistral"
    sliding = {} if window is None else {"sliding_window": window}
    config = getattr(transformers, f"{name}Config")(
        **SHAPE, **sliding, num_hidden_layers=4, vocab_size=VOCABULARY, pad_token_id=None, use_cache=False
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def step(model, ids, positions):
    """Forward and backward of the sum of log-probabilities; a document's last token counts like any other."""
    model(input_ids=ids, position_ids=positions).logits.log_softmax(-1)[..., 0].sum().backward()


def measured(case, mesh):
    """CPU seconds of this rank in a step, with cp=1 and with cp=2: the least of several steps in turn."""
    documents, window = case["documents"], case.get("window")
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in documents])[None]
    if case.get("cut_as_one"):
        held = [plans.shard_sequence(each, mesh) for each in (ids, positions)]
    else:
        cu_seqlens = torch.tensor([0, *documents]).cumsum(0)
        held = [
            plans.shard_sequence(ids, mesh, pad_value=0, cu_seqlens=cu_seqlens),
            plans.sequence_positions(cu_seqlens, mesh),
        ]
    plain, parallel = made(window), plans.apply_context_parallel(made(window), mesh)
    best = [float("inf"), float("inf")]
    for _ in range(STEPS):
        for number, (model, inputs) in enumerate([(plain, (ids, positions)), (parallel, held)]):
            dist.barrier()
            start = time.process_time()
            if model is parallel or dist.get_rank() == 0:
                step(model, *inputs)
            best[number] = min(best[number], time.process_time() - start)
            dist.barrier()
    return best


def rank(number, rendezvous, results):
    """One of the two ranks."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for name, case in CASES.items():
        seconds = torch.tensor(measured(case, mesh))
        both = [torch.empty_like(seconds) for _ in range(2)]
        dist.all_gather(both, seconds)
        if number == 0:
            plain, parallel = both[0][0].item(), [each[1].item() for each in both]
            results[name] = {
                "cpu_time": round(sum(parallel) / plain, 3),
                "larger_share": round(max(parallel) / sum(parallel), 3),
            }
    dist.destroy_process_group()


def main():
    """Print a table, and its figures as JSON."""
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(rank, (os.path.join(folder, "rendezvous"), results), nprocs=2)  # noqa: PTH118
        found = dict(results)
    print(f"{'2048 tokens':<36}{'cost a token, cp=2 : cp=1':>28}{'larger share':>16}")
    for name, figures in found.items():
        print(f"{name:<36}{figures['cpu_time']:>28.2f}{figures['larger_share']:>16.2f}")
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **found}))


if __name__ == "__main__":
    main()
