"""rl-parallel-plans in a plain FSDP2 loop of your own: tensor parallel over two processes, on a CPU.

Starts its own two processes; in a real trainer that is `torchrun --nproc-per-node 2 train.py` with the body of `train`.
On GPUs write "cuda" for "cpu" and move the model there before `parallelize`. Needs transformers, and no other package
of ours.
"""

import os
import types

import torch
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import Qwen3Config, Qwen3ForCausalLM

import rl_parallel_plans as plans

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 51}


def logp(self, ids):
    """Log-probability of each token given those before it; the logits of the whole batch never exist."""
    hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
    return plans.linear_logp(hidden.flatten(0, 1), self.lm_head, ids[:, 1:].flatten()).clone()  # FSDP warns of views


def train(rank, world_size, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=2))
    plan = plans.plan_for(model, tp=world_size)
    if rank == 0:
        print(plan.explain())
    plans.parallelize(model, mesh, plan)

    model.logp = types.MethodType(logp, model)
    register_fsdp_forward_method(model, "logp")  # FSDP gathers the parameters that `logp` reads, as for `forward`
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(34).view(2, 17)
    for step in range(5):
        loss = (
            -model.logp(ids).sum() / 32
        )  # divided by all tokens of the step: gradients are summed over dp, not averaged
        loss.backward()
        norm = plans.get_grad_norm(model.parameters())
        plans.clip_grad_by_total_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss:.3f}, gradient norm {norm:.3f}")
    weights = dict(plans.export_state_dict(model))  # full tensors in float32 on rank 0, nothing on the others
    if rank == 0:
        print(f"{len(weights)} tensors could be saved: model.save_pretrained(folder, state_dict=weights)")
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
