"""A model as it is after `parallelize`, whose layers are to be compiled."""

from transformers import Qwen3Config, Qwen3ForCausalLM

shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 51}
model = Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2))
