"""The quickstart's model: a Qwen3 of 0.4 million parameters with random weights, and a character tokenizer."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789+-*=,>:() abcdefghijklmnopqrstuvwxyz"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] }}"
    "{% else %}<assistant>{{ message['content'] }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build(seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model with weights drawn from `seed`, and its tokenizer."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    make: Any = Qwen3ForCausalLM  # has type hints in some releases of transformers and none in others
    return make(config), tokenizer


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and special tokens for the ends of a text and the two roles."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # no unknown token: other characters are errors
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        additional_special_tokens=["<user>", "<assistant>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
