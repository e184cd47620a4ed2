"""A checkpoint folder by the name of a large model, with a small one in it: only its headers are read."""

from transformers import Qwen3Config, Qwen3ForCausalLM

shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 52}
Qwen3ForCausalLM(Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=4)).save_pretrained("Qwen3-8B")
