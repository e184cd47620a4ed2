"""What is read of a Hugging Face configuration, and what is refused, in which words."""

import copy
import dataclasses

import pytest
import torch
import transformers

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import MODEL_TYPES, read_architecture

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
ROPES = {
    "default": {"rope_theta": 5e5},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "rope_theta": 1e6,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
}


def config_of(family, **fields):
    return getattr(transformers, f"{family}Config")(**{**SIZES, **fields})


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_says_its_sizes_and_its_parts(family, tied):
    mixture = family == "Qwen3Moe"
    found = read_architecture(
        config_of(family, tie_word_embeddings=tied, rms_norm_eps=1e-5, **(MIXTURE if mixture else {}))
    )
    assert found.model_type in MODEL_TYPES
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size, found.vocab_size) == (3, 32, 48, 67)
    assert (found.num_attention_heads, found.num_query_groups, found.max_positions) == (4, 2, 256)
    assert found.tied is tied
    assert found.norm_eps == 1e-5
    assert found.qkv_bias is (family == "Qwen2")
    assert found.qk_norm is family.startswith("Qwen3")
    assert (found.num_experts, found.experts_per_token, found.expert_ffn_hidden_size) == (
        (4, 2, 16) if mixture else (0, 0, 0)
    )


def test_a_head_may_be_wider_than_its_share_of_the_hidden_size():
    assert read_architecture(config_of("Llama")).head_dim == 8
    found = read_architecture(config_of("Qwen3", head_dim=16))
    assert found.head_dim == 16
    assert found.softmax_scale == 0.25


def test_key_heads_are_as_many_as_query_heads_when_they_are_not_said():
    assert read_architecture(config_of("Llama", num_key_value_heads=None)).num_query_groups == 4


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_the_model_to_the_bit(kind):
    config = config_of("Llama", **ROPES[kind])
    rope, theirs = read_architecture(config).rope, transformers.LlamaModel(config).rotary_emb
    assert torch.equal(rope.tensor(), theirs.inv_freq)
    assert rope.attention_scaling == theirs.attention_scaling
    assert (kind == "yarn") == (rope.attention_scaling > 1.1)


def test_reading_changes_no_configuration_and_needs_no_memory_of_a_device():
    config = config_of("Llama", **ROPES["yarn"])
    before = copy.deepcopy(config.to_dict())
    with torch.device("meta"):
        read_architecture(config)
    assert config.to_dict() == before


def test_yarn_scales_scores_twice_once_for_queries_and_once_for_keys():
    found = read_architecture(config_of("Llama", **ROPES["yarn"]))
    assert found.softmax_scale == pytest.approx(8**-0.5 * (0.1 * torch.tensor(4.0).log().item() + 1) ** 2)


def test_an_older_name_of_the_kind_of_rope_is_understood():
    config = config_of("Llama", rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0})
    assert read_architecture(config).rope == read_architecture(config_of("Llama", **ROPES["linear"])).rope


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Llama", {}, (None,) * 3),
        ("Mistral", {"sliding_window": 5}, (5, 5, 5)),
        ("Mistral", {"sliding_window": None}, (None,) * 3),
        ("Qwen2", {"sliding_window": 5}, (None,) * 3),
        ("Qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (None, 5, 5)),
        ("Qwen3", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, (None,) * 3),
        ("Qwen3Moe", {"sliding_window": 7, "use_sliding_window": True, **MIXTURE}, (7, 7, 7)),
    ],
)
def test_each_layer_has_its_window(family, fields, windows):
    assert read_architecture(config_of(family, **fields)).sliding_windows == windows


@pytest.mark.parametrize("normalised", [True, False])
def test_the_router_says_whether_weights_add_up_to_one(normalised):
    config = config_of("Qwen3Moe", norm_topk_prob=normalised, **MIXTURE)
    assert read_architecture(config).normalise_router is normalised


REFUSED = [
    ("Llama", {"attention_bias": True}, "attention_bias=True"),
    ("Qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("Llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads=4 is no multiple"),
    ("Llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window=0"),
    ("Qwen3Moe", {**MIXTURE, "mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
    ("Qwen3Moe", {**MIXTURE, "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("Qwen3Moe", {**MIXTURE, "num_experts_per_tok": 5}, "num_experts_per_tok=5 must be from 1 to num_experts=4"),
    ("Qwen3Moe", {**MIXTURE, "num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
    ("Qwen3Moe", {**MIXTURE, "num_experts": 0}, "num_experts=0"),
]


@pytest.mark.parametrize(("family", "fields", "named"), REFUSED)
def test_what_would_change_the_function_and_is_not_built_is_refused(family, fields, named):
    with pytest.raises(ModelError) as caught:
        read_architecture(config_of(family, **fields))
    assert named in str(caught.value)
    assert "policy.dtensor_cfg.enabled=true" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5"),
        ("rope_theta", "many", "rope_theta='many'"),
        ("rope_type", "longrope", "rope_type='longrope'"),
    ],
)
def test_rotary_fields_that_are_not_built_are_refused(field, value, named):
    config = config_of("Llama", **ROPES["linear"])
    config.rope_parameters[field] = value
    with pytest.raises(ModelError) as caught:
        read_architecture(config)
    assert named in str(caught.value)


def test_layers_of_a_kind_that_is_not_built_are_refused():
    config = config_of("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError) as caught:
        read_architecture(config)
    assert "layer_types has ['chunked_attention']" in str(caught.value)
    assert "layer_types names 2 layers of num_hidden_layers=3" in str(caught.value)
    config.layer_types, config.sliding_window = ["sliding_attention"] * 3, None
    with pytest.raises(ModelError, match="there is no sliding_window"):
        read_architecture(config)


def test_one_error_lists_all_that_is_wrong():
    with pytest.raises(ModelError) as caught:
        read_architecture(
            config_of(
                "Llama",
                attention_bias=True,
                mlp_bias=True,
                hidden_act="relu",
                rope_scaling={"rope_type": "dynamic", "factor": 2.0},
            )
        )
    assert str(caught.value).count("\n  ") == 4


def test_other_families_are_refused_with_the_reason_where_there_is_one():
    with pytest.raises(ModelError, match=r"'gemma3_text' is not built on Megatron: Gemma-3 norms what a block returns"):
        read_architecture(transformers.Gemma3TextConfig())
    with pytest.raises(ModelError, match=r"'gpt2' is not built on Megatron; what is: llama, mistral, mixtral, qwen2"):
        read_architecture(transformers.GPT2Config())


def test_a_configuration_of_other_code_is_refused_even_under_a_known_name():
    class Own(transformers.LlamaConfig):
        pass

    with pytest.raises(ModelError, match="is not the configuration that transformers has under this name"):
        read_architecture(Own(**SIZES))


def test_rotary_positions_of_each_kind_of_layer_apart_are_refused():
    config = config_of("Qwen2")
    kind = {"rope_type": "default", "rope_theta": 1e4}
    config.rope_parameters = {"full_attention": kind, "sliding_attention": {**kind, "rope_theta": 1e6}}
    with pytest.raises(ModelError, match="one kind of rotary positions for each kind of layer"):
        read_architecture(config)


def test_an_architecture_is_data_that_can_be_compared_and_replaced():
    found = read_architecture(config_of("Llama"))
    assert found == read_architecture(config_of("Llama"))
    assert dataclasses.replace(found, num_layers=2) != found
    assert hash(found) == hash(read_architecture(config_of("Llama")))
