"""Making configurations small: every kind of layer stays, proportions hold, and what comes out runs, for any class."""

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.verification.reference import draw, move_parameters
from rl_parallel_plans.verification.shrink import choose_layers, resized, shrunk, sizes_of
from rl_parallel_plans.verification.tasks import Task

transformers.logging.set_verbosity_error()


def default(model_type, **changes):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return CONFIG_MAPPING[model_type](**changes)


def logits_of(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model(input_ids=torch.arange(3, 18).view(1, 15)).logits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"), [(32, 32, (4, 4)), (32, 8, (4, 2)), (32, 1, (4, 1)), (28, 4, (4, 2))]
)
def test_heads_keep_their_relation_to_key_value_heads(heads, kv_heads, expected):
    config = transformers.LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 128)
    small = shrunk(config)
    assert (small.num_attention_heads, small.num_key_value_heads) == expected
    assert small.hidden_size == 64
    assert small.num_hidden_layers == 2


def test_more_ranks_need_more_heads():
    small = shrunk(transformers.LlamaConfig(num_key_value_heads=8), tp=4)
    assert (small.num_attention_heads, small.num_key_value_heads, small.hidden_size) == (8, 4, 128)


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"num_hidden_layers": 32}, (0, 31)),
        ({"num_hidden_layers": 6, "layer_types": ["a", "a", "b", "a", "a", "b"]}, (0, 2)),
        ({"num_hidden_layers": 9, "layer_types": list("aabaabaab"), "first_k_dense_replace": 3}, (0, 2, 3, 5)),
        ({"num_hidden_layers": 8, "hybrid_override_pattern": "M-M*-M-M"}, (0, 1, 3)),
        ({"num_hidden_layers": 6, "full_attn_idxs": [2, 5]}, (0, 2)),
        ({"num_hidden_layers": 6, "layer_types": list("ababab"), "num_kv_shared_layers": 2}, (0, 1, 4, 5)),
        ({"layers_block_type": ["mamba", "moe", "mamba", "attention"]}, (0, 1, 3)),
        ({"hidden_size": 8}, None),
    ],
)
def test_one_layer_of_each_kind_is_kept(section, kept):
    assert choose_layers(section) == kept


def test_layer_lists_stay_as_long_as_there_are_layers():
    config = default("gemma3_text")
    small = shrunk(config)
    assert small.num_hidden_layers == len(small.layer_types) == len(set(config.layer_types))
    deeper = shrunk(config, extra_layers=1)
    assert deeper.num_hidden_layers == small.num_hidden_layers + 1


def test_mixture_of_experts_keeps_dense_layers_and_groups():
    small = shrunk(default("deepseek_v3"))
    assert (small.n_routed_experts, small.num_experts_per_tok, small.n_group, small.topk_group) == (4, 2, 2, 1)
    assert small.first_k_dense_replace == 1
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    assert torch.isfinite(logits_of(small)).all()


def test_state_space_heads_times_their_size_are_the_inner_width():
    small = shrunk(default("bamba"))
    assert small.mamba_n_heads * small.mamba_d_head == small.mamba_expand * small.hidden_size


def test_rotary_sections_add_up_to_half_a_head():
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    name = "rope_parameters" if int(transformers.__version__.split(".")[0]) >= 5 else "rope_scaling"
    config = default("qwen2_5_vl")
    setattr(config.text_config, name, rope)
    small = getattr(shrunk(config).text_config, name)
    assert sum(small["mrope_section"]) == 8


def test_tokens_lie_in_the_small_vocabulary():
    small = shrunk(default("llava", image_token_index=32000))
    assert 0 < small.image_token_index < small.text_config.vocab_size == 128
    assert shrunk(default("llama"), vocabulary=129).vocab_size == 129


def test_widths_keep_their_relation_to_the_hidden_size():
    sizes = sizes_of({"num_attention_heads": 32, "head_dim": 128}, (4096, 1024), tp=2, vocabulary=128)
    assert resized("some_unknown_dim", 8192, sizes) == 128
    assert resized("projector_hidden_size", 1024, sizes) == 64
    assert resized("out_hidden_size", 4096, sizes) == 64
    assert resized("head_dim", 256, sizes) == 32
    assert resized("temperature", 700, sizes) == 700


def test_class_that_refuses_the_sizes_is_refused_with_its_reason():
    class Stubborn(transformers.LlamaConfig):
        @classmethod
        def from_dict(cls, *_, **__):
            raise ValueError("hidden_size must be a prime")

    with pytest.raises(PlanError, match="hidden_size must be a prime; pass a small configuration"):
        shrunk(Stubborn())


@pytest.mark.parametrize(
    "model_type",
    ["bloom", "codegen", "cohere2", "falcon", "falcon_h1", "gpt2", "gpt_neox", "gpt_oss", "jamba", "lfm2", "mamba2",
     "minimax", "mpt", "nemotron_h", "olmoe", "opt", "phi", "phimoe", "qwen3_next", "stablelm", "starcoder2", "zamba2"],
)  # fmt: skip
def test_class_that_nobody_named_runs_when_small(model_type):
    logits = logits_of(shrunk(default(model_type), vocabulary=129))
    assert logits.shape == (1, 15, 129)
    assert torch.isfinite(logits).all()


def test_tokens_are_drawn_until_no_router_is_near_a_tie():
    model = transformers.AutoModelForCausalLM.from_config(shrunk(default("mixtral"))).eval()
    move_parameters(model)
    batch = draw(model, Task(name="any"), dp=1)
    assert 1e-4 <= batch.margin < 1
    assert all(bool((p != 0).any()) and not torch.equal(p, torch.ones_like(p)) for p in model.parameters())
