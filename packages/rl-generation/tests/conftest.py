"""Tiny models with random weights, a tiny tokenizer, and shapes that are checked while the tests run."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook
from torch import nn

EMBEDDED = ["continuous_batching", "recorded_forward", "rows", "slot_model", "whole_batches"]
SHAPED = [
    "rl_generation.distribution",
    "rl_generation.verify",
    *(f"rl_generation.embedded.{room}" for room in EMBEDDED),
]
install_import_hook(SHAPED, "beartype.beartype")

# Before the tests are imported, whose own settings begin with these: no timing decides a test.
settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")

VOCAB_SIZE = 40
# Passing 16 tokens makes forward replace the buffer of rotary frequencies.
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
SLIDING = {"sliding_window": 6}
NAMES = {
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3Text",
    "llama_longrope": "Llama",
    "qwen3_moe": "Qwen3Moe",
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
        "bloom": {},
        "gemma2": {"head_dim": 8, "attn_logit_softcapping": 2.0, "attn_implementation": "eager", **SLIDING},
        "gemma3": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], **SLIDING},
        "llama": {},
        "lfm2": {"block_ff_dim": 64, "layer_types": ["conv", "full_attention"]},
        "llama_longrope": {"rope_scaling": LONGROPE},
        "mamba": {"state_size": 8},
        "mistral": SLIDING,
        "phi3": SLIDING,
        "qwen2": {},
        "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
        "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    }
    return config | special[family]


def build(family: str, seed: int = 0, **changes) -> nn.Module:
    """A model of `family` in eval mode."""
    import transformers

    name = NAMES.get(family, family.capitalize())
    torch.manual_seed(seed)
    if family == "gpt2":
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, **special)
        return transformers.GPT2LMHeadModel(config).eval()
    config_name = "Gemma3TextConfig" if family == "gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**(_config(family) | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def build_tokenizer():
    """Bytes of 'a' to 'z', of a space and of 'é', and a few pairs: 40 tokens, of which the first three are special."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ã", "©"]
    pairs = ["ab", "Ġa", "Ġb", "Ġab", "cd", "ef", "gh", "ij"]
    vocab = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *letters, *pairs])}
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "b"), ("Ġ", "ab"), ("c", "d"), ("e", "f"), ("g", "h"), ("i", "j")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    return build


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()
