"""Two ranks along the axis pp, and two microbatches."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_parallel_plans import (
    clip_grad_by_total_norm_,
    get_logprobs_from_vocab_parallel_logits,
    pipeline_stages,
    plan_for,
)

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("pp", "dp", "tp"))
shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 51}
model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
plan = plan_for(model, tp=1)
rows = torch.arange(68).view(4, 17) % 51
microbatches = [{"input_ids": each[:, :-1], "targets": each[:, 1:]} for each in rows.chunk(2)]


def count_over_the_whole_step(microbatches):
    return sum(batch["targets"].numel() for batch in microbatches)
