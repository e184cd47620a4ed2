"""An embedded engine and the policy that it is refitted from."""

import copy

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_generation import AgreementMonitor, Sampling, TransformersEngine, VllmOptions, verify_logp

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 51}
config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
policy = Qwen3ForCausalLM(config).eval()
engine = TransformersEngine(copy.deepcopy(policy), stop_token_ids=[2], pad_token_id=0)
sampling, optimizer_steps, steps = Sampling(max_new_tokens=8), 1, 3
