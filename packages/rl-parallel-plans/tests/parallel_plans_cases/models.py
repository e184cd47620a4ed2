"""Tiny random models, fp32, every parameter moved away from its initial value so that nothing is right by chance."""

import torch
import transformers

transformers.logging.set_verbosity_error()

VOCABULARY = 128
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_cache": False,
}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama_bias": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {}),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, {}),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, {"residual_multiplier": 0.3}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM, {"sliding_window": 8}),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM, {"use_qk_norm": True}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_scaling": None},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_shared_experts": 1,
            "head_dim": 8,
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM, {}),
}


def tiny(architecture, *, tied=False, **changes):
    """A model of two layers; the same numbers at every call."""
    config_class, model_class, extra = ARCHITECTURES[architecture]
    config = config_class(**{**SHAPE, **extra, "tie_word_embeddings": tied, **changes})
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def tiny_on_meta(architecture, **changes):
    """The same model without numbers."""
    config_class, model_class, extra = ARCHITECTURES[architecture]
    with torch.device("meta"):
        return model_class(config_class(**{**SHAPE, **extra, "tie_word_embeddings": False, **changes}))


def token_ids(rows, length, vocabulary=VOCABULARY):
    """Random tokens [rows, length], the same at every call."""
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
