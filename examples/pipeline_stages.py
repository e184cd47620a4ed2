"""Pipeline stages in a plain training loop: two stages on two processes, 1F1B, tied embeddings, on a CPU.

Starts its own two processes; in a real trainer that is `torchrun --nproc-per-node 2 train.py` with the body of `train`.
On GPUs write "cuda" for "cpu" and move the model there before `pipeline_stages`. The mesh has the axes dp and tp too:
raise their sizes to shard each stage. Needs transformers, and no other package of ours.
"""

import os

import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl_parallel_plans as plans

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 51}
MICROBATCHES = 4


def train(rank, world_size, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
    config = Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    plan = plans.plan_for(model, tp=1)
    pipeline = plans.pipeline_stages(model, mesh, plan, schedule="1f1b")
    del model  # this rank's stages have what they need of it
    for stage in pipeline.stages:
        print(f"rank {rank}: {plans.stage_info(stage)}")

    ids = torch.arange(8 * 17).view(8, 17) % 51
    weights_of_tokens = torch.ones(8, 16)  # which tokens count: a loss mask
    tokens_of_step = weights_of_tokens.sum()  # over all microbatches and dp ranks, before the first backward
    microbatches = [
        {"input_ids": ids, "weights": weights}
        for ids, weights in zip(ids.chunk(MICROBATCHES), weights_of_tokens.chunk(MICROBATCHES), strict=True)
    ]

    def loss(model, batch):
        """Written as for one process. Every stage calls it; after the layers, it runs in the last stage alone."""
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1]
        logp = plans.linear_logp(hidden.flatten(0, 1), model.lm_head, batch["input_ids"][:, 1:].flatten())
        return -(logp * batch["weights"].flatten()).sum() / tokens_of_step

    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step in range(5):
        value = pipeline.step(microbatches, loss)  # the sum over microbatches, on every rank
        norm = pipeline.grad_norm()  # over all stages; the tied weight counts once
        plans.clip_grad_by_total_norm_(pipeline.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {value:.3f}, gradient norm {norm:.3f}")
    weights = dict(pipeline.export_state_dict())  # full tensors of all stages on rank 0, nothing on the others
    if rank == 0:
        print(f"{len(weights)} tensors could be saved under the model's own names")
    last = torch.distributed.barrier(async_op=True)  # no rank leaves while another still talks to it
    last.wait()  # `last` keeps it alive: if a thread of gloo freed it while Python exits, torch 2.13 could abort
    torch.distributed.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    mp.spawn(train, args=(2, free_port()), nprocs=2)
