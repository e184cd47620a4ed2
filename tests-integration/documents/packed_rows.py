"""Two ranks along the axis cp, and one packed row of 4096 tokens."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_parallel_plans import apply_context_parallel, apply_fsdp, sequence_positions, shard_sequence, unshard_sequence

torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 51}
model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
ids = torch.arange(4096)[None] % 51
apply_context_parallel(model, mesh)
apply_fsdp(model, mesh, dp_axis=("dp", "cp"))
