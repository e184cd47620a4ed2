"""Saves a tiny model with a tokenizer of 256 bytes, as a folder that every engine can serve.

python saved_model.py FOLDER
"""

import sys
from pathlib import Path

SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>")
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% if terse %}!{% endif %}{% endif %}"
)
MAX_LENGTH = 128


def save(folder: Path, *, seed: int = 0, tokenizer: bool = True) -> Path:
    """Write the model, and if wanted its tokenizer; heads are as wide as vLLM on a CPU needs them."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *symbols])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(folder)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
