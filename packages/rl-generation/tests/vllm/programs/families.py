"""Tiny models of five families with a tokenizer, a Llama that recites a story, and a fair test of sampled tokens.

The tokenizer is a byte-level BPE: it has whole words, characters of several tokens, and fewer tokens than the models
have rows. The reciting Llama continues each token of the story with the next one: always where it is greedy, with a
probability of about 0.6 where it is sampled. So the text of its answers is known, and stop strings do occur in it.
"""

import functools
import random
import string

import torch

VOCAB_SIZE = 300
EOS = 2
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
STORY = "Once upon a time, the café sold 🙂 and ended. STOP!"
WORDS = [" upon", " a", " time", " the", " caf", " sold", " and", " ended", " ST", "Once", "time", "ST", "OP"]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3"]

MAX_LENGTH = 256
PULL = 0.12
HEAD = {"head_dim": 32}  # vLLM's attention on a CPU needs 32 or more
TIED = {"tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
GEMMA = {"num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 32}
CLASSES = {
    "llama": ("Llama", "Llama", {}),
    "qwen2": ("Qwen2", "Qwen2", TIED),
    "qwen3": ("Qwen3", "Qwen3", HEAD | TIED),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", HEAD | EXPERTS),
    "gemma3": ("Gemma3", "Gemma3Text", HEAD | GEMMA),
}


def policy(family, seed=0):
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
    name, config_name, special = CLASSES[family]
    config = getattr(transformers, f"{config_name}Config")(**shape | special)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, f"{name}ForCausalLM")(config).float().eval().requires_grad_(requires_grad=False)
        if family == "gemma3":  # tied and scaled by sqrt(hidden): wider, and it repeats one token for ever
            made.model.embed_tokens.weight.normal_(0, 0.06)
    return made


def reciting(seed=0):
    """A Llama whose likeliest next token is the next one of the story; eos follows its end, and then its beginning."""
    made = policy("llama", seed)
    embedding, head = made.model.embed_tokens.weight, made.lm_head.weight
    head *= 0.5
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        embedding.normal_(0, 12.0)  # wider than what the layers add to it
    embedding[:, 0] = 24.0  # what all tokens share, and lifts those of the story
    head[list(successors()), 0] += 1.0
    for token, following in successors().items():
        head[following] += PULL * embedding[token] / embedding[token].std()
    return made


def successors():
    """Each token of the story → what follows it."""
    story = [*tokenizer().encode(STORY), EOS]
    return dict(zip(story, [*story[1:], story[0]], strict=True))


def recited(count, *, after):
    """The `count` tokens that a greedy answer to a prompt with `after` at its end begins with."""
    tokens = [after]
    for _ in range(count):
        tokens.append(successors()[tokens[-1]])
    return tuple(tokens[1:])


@functools.cache
def tokenizer():
    """Bytes, and merges for the words of the story alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [word.replace(" ", "Ġ") for word in WORDS]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    made = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(SPECIALS + symbols)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in SPECIALS])
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def save(model, path, *, with_tokenizer=True):
    """Write a checkpoint that vLLM reads; return its folder."""
    model.save_pretrained(path)
    if with_tokenizer:
        tokenizer().save_pretrained(path)
    return str(path)


def prompts(count, *, seed=0, longest=60):
    """Ragged ones of ordinary tokens, some longer than Gemma's window; they end with a whole character, a letter."""
    draw, letters = random.Random(seed), tokenizer().convert_tokens_to_ids(list(string.ascii_letters))
    bodies = [[draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randrange(longest))] for _ in range(count)]
    return [[*body, draw.choice(letters)] for body in bodies]


def distribution(model, prompt, *, temperature=1.0, top_p=1.0):
    """Probabilities of the token after `prompt`: a plain forward, and a nucleus in the words of its paper: [V]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    probabilities = (logits / temperature).softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    smallest = int((ordered.cumsum(-1) < top_p).sum()) + 1  # the fewest tokens that reach top_p
    kept = torch.zeros_like(probabilities)
    kept[order[:smallest]] = ordered[:smallest]
    return kept / kept.sum()


def p_value(tokens, probabilities):
    """How often a fair sample is at least as far from `probabilities`, by Pearson's chi-square.

    Tokens expected less than five times are counted together. A token that cannot be drawn gives 0.
    """
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probabilities)).double()
    if bool((observed[probabilities == 0] > 0).any()):
        return 0.0
    expected = len(tokens) * probabilities
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    distance = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = torch.tensor(float(used.sum()) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, distance / 2))
