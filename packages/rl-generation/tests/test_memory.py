"""Claims about memory: figures of real tensors, and of published models, come out exactly."""

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rl_generation.embedded.slot_model import cache_argument
from rl_generation.errors import EngineOptionError
from rl_generation.memory import CacheLayer, EngineMemory, estimate_memory

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2-tied": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **MOE, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHAPE,
        head_dim=32,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, **LATENT, **ROUTED, moe_intermediate_size=32, first_k_dense_replace=1
    ),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=260, n_positions=128),
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def llama_8b(**changes):
    return transformers.LlamaConfig(**LLAMA_8B | changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_with_ties_once(name):
    config = CONFIGS[name]()
    real = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
    memory = estimate_memory(config, dtype="float32")
    assert memory.parameters == real
    assert memory.weight_bytes == 4 * real


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3", "qwen3_moe", "gemma3", "gpt2"])
def test_a_token_takes_what_the_cache_of_transformers_holds_of_it(name):
    config = CONFIGS[name]()
    tokens = 12  # within the window of Gemma 3
    cache = transformers.DynamicCache(config=config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model(torch.ones(1, tokens, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
    held = sum(each.keys.nbytes + each.values.nbytes for each in cache.layers)
    assert estimate_memory(config, dtype="float32").kv_bytes_per_token * tokens == held


def test_llama_3_1_8b_is_what_its_publisher_says():
    memory = estimate_memory(llama_8b(), dtype="bfloat16", kv_cache_memory_bytes=16 << 30)
    assert memory.parameters == 8_030_261_248
    assert memory.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert memory.sequence_bytes(131072) == 16 << 30
    assert memory.full_length_sequences == 1.0
    assert memory.kv_cache_tokens == memory.longest_sequence == 131072


def test_latent_attention_keeps_one_vector_whole_on_every_rank():
    config = transformers.DeepseekV3Config(num_hidden_layers=4, n_routed_experts=8, num_experts_per_tok=2)
    for ranks in (1, 4):
        memory = estimate_memory(config, dtype="bfloat16", tensor_parallel_size=ranks)
        assert memory.kv_bytes_per_token == 4 * (512 + 64) * 2


def test_ranks_share_matrices_and_heads_but_not_vectors_and_not_more_heads_than_there_are():
    config = CONFIGS["llama"]()
    parameters = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    for ranks in (1, 2, 4):
        share = 0
        for name, each in parameters.items():
            cut = min(ranks, 2) if "k_proj" in name or "v_proj" in name else ranks
            share += each.numel() // (cut if each.dim() == 2 else 1)
        memory = estimate_memory(config, dtype="bfloat16", tensor_parallel_size=ranks)
        assert memory.weight_bytes == 2 * share
        assert memory.kv_bytes_per_token == 3 * 2 * (2 // min(ranks, 2)) * 16 * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_fullest_stage_of_a_pipeline_has_its_layers_and_an_end_of_the_model(stages, tied):
    config = transformers.LlamaConfig(**LLAMA_8B | {"num_hidden_layers": 7, "tie_word_embeddings": tied})
    memory = estimate_memory(config, dtype="bfloat16", tensor_parallel_size=2, pipeline_parallel_size=stages)
    alone = estimate_memory(config, dtype="bfloat16", tensor_parallel_size=2)
    layer = (
        alone.weight_bytes
        - estimate_memory(
            transformers.LlamaConfig(**LLAMA_8B | {"num_hidden_layers": 6, "tie_word_embeddings": tied}),
            dtype="bfloat16",
            tensor_parallel_size=2,
        ).weight_bytes
    )
    embedding, norm = 128256 * 4096 // 2 * 2, 4096 * 2
    sizes = {1: [7], 2: [4, 3], 3: [2, 3, 2], 5: [1, 1, 2, 2, 1]}[stages]  # as vLLM's get_pp_indices
    whole = [size * layer for size in sizes]
    whole[0] += embedding
    whole[-1] += norm + embedding * (not tied or stages > 1)
    assert memory.weight_bytes == max(whole)
    assert memory.parameters == alone.parameters
    assert len(memory.layers) == max(sizes)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(EngineOptionError, match="2 layers are fewer than the stages of pipeline_parallel_size=3"):
        estimate_memory(llama_8b(num_hidden_layers=2), dtype="bfloat16", pipeline_parallel_size=3)


def test_a_cache_of_eight_bits_takes_half_of_one_of_sixteen():
    halves = [
        estimate_memory(llama_8b(), dtype="bfloat16", kv_cache_dtype=each) for each in ("fp8", "fp8_e5m2", "auto")
    ]
    assert [each.kv_bytes_per_token for each in halves] == [65536, 65536, 131072]


def test_layers_with_a_window_stop_growing():
    config = CONFIGS["gemma3"]()
    memory = estimate_memory(config, dtype="float32", block_size=8, max_num_batched_tokens=32)
    token = 2 * 2 * 32 * 4
    # Two layers see 16 tokens, and hold what one step may add: 15 + 32 are 6 blocks, and one for a crooked start.
    assert memory.sequence_bytes(512) == token * (512 + 2 * 7 * 8)
    assert memory.sequence_bytes(8) == token * (8 + 2 * 2 * 8)


def test_groups_of_layers_are_padded_to_equal_size():
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 7}, head_dim=32, sliding_window=16, layer_types=kinds
    )
    memory = estimate_memory(config, dtype="float32", block_size=8, max_num_batched_tokens=32)
    token = 2 * 2 * 32 * 4
    assert memory.sequence_bytes(512) == token * (2 * 512 + 6 * 7 * 8)  # five layers take three groups of two


def test_layers_that_share_another_layers_cache_have_none():
    config = transformers.Gemma3nTextConfig(vocab_size=512, vocab_size_per_layer_input=512, num_hidden_layers=10)
    config.num_kv_shared_layers = 4
    config.layer_types = config.layer_types[:10]
    assert len(estimate_memory(config, dtype="bfloat16").layers) == 6


def test_layers_with_a_state_are_left_out_and_it_says_so():
    config = transformers.Qwen3NextConfig(**{**SHAPE, "num_hidden_layers": 4}, **MOE, head_dim=32)
    memory = estimate_memory(config, dtype="bfloat16")
    assert len(memory.layers) == 1
    assert "3 layers keep a state" in memory.explain()


def test_a_quantised_checkpoint_is_counted_as_if_it_were_not_and_it_says_so():
    memory = estimate_memory(llama_8b(quantization_config={"quant_method": "fp8"}), dtype="bfloat16")
    assert memory.weight_bytes == 2 * 8_030_261_248
    assert "quantised" in memory.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "32 attention heads do not divide over tensor_parallel_size=3"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"max_model_len": -1}, "max_model_len must be at least 1"),
        ({"dtype": "float17"}, "'float17' is no dtype of torch"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(EngineOptionError, match=message):
        estimate_memory(llama_8b(), **{"dtype": "bfloat16"} | options)


def test_it_explains_what_fits_and_what_vllm_refuses():
    roomy = estimate_memory(llama_8b(), dtype="bfloat16", max_num_seqs=64, kv_cache_memory_bytes=40 << 30)
    text = roomy.explain()
    for part in ("15.0 GiB", "8,030,261,248", "128.0 KiB a token in 32 layers", "2.5 of that length", "some wait"):
        assert part in text
    tight = estimate_memory(llama_8b(), dtype="bfloat16", kv_cache_memory_bytes=4 << 30)
    assert "vLLM refuses to start: give more, or max_model_len=32768" in tight.explain()
    unknown = estimate_memory(llama_8b(), dtype="bfloat16", max_model_len=4096, max_num_seqs=4)
    assert "at most  2.0 GiB for max_num_seqs=4" in unknown.explain()


LAYERS = st.lists(
    st.builds(CacheLayer, token_bytes=st.sampled_from([64, 64, 256]), window=st.sampled_from([None, None, 7, 32])),
    min_size=1,
    max_size=8,
)


def memory_of(layers, *, length, cache):
    fixed = {"model_type": "any", "parameters": 1, "weight_bytes": 1, "max_num_seqs": None}
    fixed["element_bytes"] = 2
    return EngineMemory(
        **fixed,
        layers=tuple(layers),
        max_model_len=length,
        max_num_batched_tokens=8,
        block_size=4,
        kv_cache_bytes=cache,
    )


@given(layers=LAYERS, length=st.integers(1, 300))
def test_a_longer_sequence_never_takes_less(layers, length):
    memory = memory_of(layers, length=400, cache=None)
    assert memory.sequence_bytes(length) <= memory.sequence_bytes(length + 1)
    assert memory.sequence_bytes(length) >= sum(
        each.token_bytes * min(length, each.window or length) for each in layers
    )


@given(layers=LAYERS, length=st.integers(1, 300), cache=st.integers(1, 500_000))
def test_the_longest_sequence_fits_and_no_longer_one_does(layers, length, cache):
    memory = memory_of(layers, length=length, cache=cache)
    longest = memory.longest_sequence
    assert 0 <= longest <= length
    assert (longest == length) == (memory.full_length_sequences >= 1)
    assert longest == 0 or memory.sequence_bytes(longest) <= cache
    more = memory_of(layers, length=length, cache=2 * cache)
    assert more.longest_sequence >= longest
    assert more.kv_cache_tokens >= memory.kv_cache_tokens


def test_a_cpu_cache_that_nobody_sized_holds_a_response_of_full_length_and_stays_within_bounds():
    tiny = transformers.LlamaConfig(**SHAPE)
    assert estimate_memory(tiny, dtype="float32").default_cpu_cache_bytes == 256 * 2**20
    wide = transformers.LlamaConfig(**{**SHAPE, "hidden_size": 4096, "num_hidden_layers": 32})
    for length in (512, 4096, 65536):
        given = estimate_memory(wide, dtype="bfloat16", max_model_len=length).default_cpu_cache_bytes
        memory = estimate_memory(
            wide, dtype="bfloat16", max_model_len=length, block_size=128, kv_cache_memory_bytes=given
        )
        assert memory.full_length_sequences > 1  # or vLLM refuses to start
        assert given <= 4 * 2**30 or memory.full_length_sequences < 2
    few, many = (estimate_memory(wide, dtype="bfloat16", max_model_len=4096, max_num_seqs=each) for each in (1, None))
    assert few.default_cpu_cache_bytes < many.default_cpu_cache_bytes


def test_an_engine_on_a_gpu_leaves_room_for_the_weights_that_a_refit_stages():
    gib = 2**30
    memory = memory_of([CacheLayer(64, None)], length=1, cache=None)
    share = replace(memory, weight_bytes=16 * gib).default_gpu_memory_utilization(80 * gib)
    assert share == 0.72
    assert share * 80 * gib + 16 * gib <= 0.92 * 80 * gib
    least = replace(memory, weight_bytes=90 * gib).default_gpu_memory_utilization(80 * gib)
    assert least == 0.01, "vLLM says then what does not fit"
