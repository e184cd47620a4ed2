"""Tiny models of five architectures with a tokenizer, options of engines of them, and what a plain forward says."""

import torch

VOCAB_SIZE = 260
EOS = 2


def policy(architecture, seed):
    """A model of transformers with random weights in fp32, wide enough that its answers depend on them."""
    import transformers

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    head = {"head_dim": 32}  # vLLM's attention on a CPU needs 32 or more
    tied = {"tie_word_embeddings": True}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    gemma = {"num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 32}
    name, config_name, special = {
        "llama": ("Llama", "Llama", {}),
        "qwen2": ("Qwen2", "Qwen2", tied),
        "qwen3": ("Qwen3", "Qwen3", head | tied),
        "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", head | experts),
        "gemma3": ("Gemma3", "Gemma3Text", head | gemma),
    }[architecture]
    config = getattr(transformers, f"{config_name}Config")(**shape | special)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, f"{name}ForCausalLM")(config).float().eval().requires_grad_(requires_grad=False)
        if architecture == "gemma3":  # tied and scaled by sqrt(hidden): wider, and it repeats one token for ever
            made.model.embed_tokens.weight.normal_(0, 0.06)
    return made


def save_tokenizer(path):
    """Beside a model: 0 to 3 are special, and every other token is one byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>", "<unk>"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(specials + symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
    ).save_pretrained(path)


def options(path, **others):
    """What every engine here is made with."""
    from rl_generation.vllm import VllmOptions

    return VllmOptions(
        **{
            "model": path,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 32 << 20,
            **others,
        }
    )


def prompts(count, *, seed=0):
    """Ragged ones of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 40, (count,), generator=generator).tolist()
    return [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def logits(model, prompt, tokens):
    """Of a plain forward, before each of `tokens`: [T, V] in fp32."""
    with torch.no_grad():
        every = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0].float()
    return every[len(prompt) - 1 : -1]


def cut_logp(logits, *, temperature=1.0, top_p=1.0):
    """Log-softmax over the tokens of the nucleus, minus infinity elsewhere: [T, V]."""
    logp = (logits / temperature).log_softmax(-1)
    ordered, order = logp.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    keep = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < top_p)
    return logp.masked_fill(~keep, -torch.inf).log_softmax(-1)


def chosen(logp, tokens):
    """Of `[T, V]`, the entries of `tokens`, as floats."""
    return logp[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
