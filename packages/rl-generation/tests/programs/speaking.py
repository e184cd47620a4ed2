"""A tiny model that speaks: a real byte-level BPE tokenizer with ChatML's template, and a model with random weights."""

import torch

TEXT = "hello there, how are you? the weather is fine; other theories hold here. heel, wheel, shell. höher 你好 🙂 " * 3
SPECIAL = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('dear ' if polite else '') }}{% endif %}"
)


def tokenizer():
    """Bytes and merges learnt from a few words, so that one text has many encodings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    names = {"pad_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[3]}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML, **names)


def model(vocab_size, seed=0, positions=160, heads=4, head_dim=8):
    """A model of transformers with random weights, peaked enough for greedy answers that differ."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config).eval()
