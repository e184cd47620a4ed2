"""Tiny models with random weights, and shapes that are checked while the tests run."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import install_import_hook
from torch import nn

SHAPED = ["rl_generation.decode", "rl_generation.distribution", "rl_generation.verify"]
install_import_hook(SHAPED, "beartype.beartype")

VOCAB_SIZE = 40
# Passing 16 tokens makes forward replace the buffer of rotary frequencies.
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}


def _config(family: str) -> dict:
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # peaked enough for greedy answers that differ
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    special = {
        "gemma3": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "llama": {},
        "lfm2": {"block_ff_dim": 64, "layer_types": ["conv", "full_attention"]},
        "llama_longrope": {"rope_scaling": LONGROPE},
        "qwen2": {},
        "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    }
    return config | special[family]


def build(family: str, seed: int = 0, **changes) -> nn.Module:
    """A model of `family` in eval mode."""
    import transformers

    name = {"gemma3": "Gemma3", "llama_longrope": "Llama"}.get(family, family.capitalize())
    torch.manual_seed(seed)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    config_name = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**(_config(family) | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    return build
