"""Megatron's model against the Hugging Face model of the same weights: logits and gradients of long rows, in float32.

Rows of 640 tokens, past every original length and window here: what is wrong with positions shows late in a row.
"""

import dataclasses
import os

import pytest
import torch
import transformers
from test_architecture import MIXTURE, ROPES, SIZES

from rl_backends.errors import ModelError
from rl_backends.megatron.architecture import read_architecture
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.gpt_model import (
    layers_of_stages,
    padded_vocab_size,
    require_layout,
    transformer_config,
)
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.mapping import held_tensors

pytestmark = pytest.mark.filterwarnings(  # megatron-core 0.16.1 says so to its own linear layers, in every forward
    "ignore:Warning. tp_group is None, using default tp group:DeprecationWarning"
)
BAR = 1e-5
VP = "virtual_pipeline_model_parallel_size"
LENGTH = 640
WINDOWS = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2}
MODELS = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Llama, rope of Llama 3": ("Llama", {**ROPES["llama3"], "head_dim": 16}),
    "Llama, linear rope": ("Llama", ROPES["linear"]),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, sliding windows": ("Mistral", {"sliding_window": 33}),
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen2, YaRN, windows in two of four layers": ("Qwen2", {**ROPES["yarn"], **WINDOWS}),
    "Qwen3": ("Qwen3", {**ROPES["default"], "head_dim": 16}),
    "Qwen3, YaRN, tied": ("Qwen3", {**ROPES["yarn"], "head_dim": 16, "tie_word_embeddings": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "Mixtral, sliding windows, tied": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 33, "tie_word_embeddings": True},
    ),
    "Qwen3-MoE": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
    "Qwen3-MoE, weights not normalised": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": False}),
}


def plain_model(family, **fields):
    """Weights so large that attention looks far back, and not alike for all tokens."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "num_hidden_layers": 4, **fields})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model.eval()


def tokens():
    return torch.randint(0, SIZES["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))


def built(architecture, groups, config=None):
    from rl_backends.megatron.gpt_model import build_gpt_model

    return build_gpt_model(architecture, config or MegatronConfig(), groups=groups)


@torch.no_grad()
def filled(gpt, model, groups):
    """The weights of `model`, whose configuration may be another's than that which `gpt` was made of."""
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    held = held_tensors([gpt], read_architecture(model.config), shapes, groups=groups)
    for each in held:
        for box in each.parts:
            box.of_local(each.local).copy_(box.of_whole(weights[each.name]))
    return held


def logits_of(gpt, rows):
    with cpu_compat():
        hidden = gpt(rows, None, None)
    return (hidden @ gpt.head_weight.T).transpose(0, 1)[..., : SIZES["vocab_size"]]


def apart(ours, theirs):
    """Relative to the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def logits_apart(model, architecture):
    """Of `model`, and of Megatron's for `architecture` with the same weights."""
    groups = ParallelGroups.join(MegatronConfig())
    gpt = built(architecture, groups)
    filled(gpt, model, groups)
    with torch.no_grad():
        difference = apart(logits_of(gpt, tokens()), model(input_ids=tokens(), use_cache=False).logits)
    groups.leave()
    return difference


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_hugging_face(name, on_ranks):
    family, fields = MODELS[name]

    def run(_):
        model, rows = plain_model(family, **fields), tokens()
        groups = ParallelGroups.join(MegatronConfig())
        gpt = built(read_architecture(model.config), groups)
        held = filled(gpt, model, groups)
        weight = torch.randn(*rows.shape, SIZES["vocab_size"], generator=torch.Generator().manual_seed(2))
        theirs = model(input_ids=rows, use_cache=False).logits
        (theirs * weight).sum().backward()
        ours = logits_of(gpt, rows)
        with cpu_compat():
            (ours * weight).sum().backward()
        gradients = {key: value.grad for key, value in model.named_parameters()}
        worst = max(
            apart(box.of_local(each.view(each.parameter.grad)), box.of_whole(gradients[each.name]))
            for each in held
            for box in each.parts
        )
        assert {each.name for each in held} == set(gradients)
        return apart(ours.detach(), theirs.detach()), worst

    ((logits, gradients),) = on_ranks(run, ranks=1)
    assert logits <= BAR
    assert gradients <= BAR


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (ROPES["llama3"], {"rope_theta": 5e5}),
        (ROPES["linear"], {"rope_theta": 1e4}),
        (ROPES["yarn"], {"rope_theta": 1e6}),
        (ROPES["default"], {"rope_theta": 4.9e5}),
        ({"sliding_window": 500}, {"sliding_window": None}),
        ({"sliding_window": 500}, {"sliding_window": 501}),
    ],
    ids=["llama3", "linear", "yarn", "base", "window", "window by one"],
)
def test_the_comparison_sees_a_dropped_scaling_a_wrong_base_and_a_wrong_window(fields, wrong, on_ranks):
    def run(_):
        model = plain_model("Mistral", **{"sliding_window": None, **fields})
        config = transformers.MistralConfig(**{**SIZES, "num_hidden_layers": 4, "sliding_window": None, **wrong})
        return logits_apart(model, read_architecture(config))

    (difference,) = on_ranks(run, ranks=1)
    assert difference > 10 * BAR


def test_the_comparison_sees_yarns_factor_on_one_side_of_scores_only(on_ranks):
    def run(_):
        model = plain_model("Llama", **ROPES["yarn"])
        right = read_architecture(model.config)
        half = dataclasses.replace(right.rope, attention_scaling=right.rope.attention_scaling**0.5)
        return logits_apart(model, dataclasses.replace(right, rope=half))

    (difference,) = on_ranks(run, ranks=1)
    assert difference > 10 * BAR


def test_nothing_is_random_before_weights_are_loaded_and_the_environment_stays(on_ranks):
    def run(_):
        before = dict(os.environ)
        groups = ParallelGroups.join(MegatronConfig())
        gpt = built(read_architecture(plain_model("Qwen3Moe", **MIXTURE).config), groups)
        values = {name: parameter.unique().tolist() for name, parameter in gpt.named_parameters()}
        groups.leave()
        return values, dict(os.environ) == before

    ((values, same),) = on_ranks(run, ranks=1)
    assert same
    assert values
    assert all(found == ([1.0] if "norm" in name else [0.0]) for name, found in values.items())


def test_megatron_knows_which_parameters_ranks_share(on_ranks):
    def run(_):
        groups = ParallelGroups.join(MegatronConfig())
        gpt = built(read_architecture(plain_model("Qwen3Moe", **MIXTURE).config), groups)
        return {name: bool(getattr(each, "tensor_model_parallel", False)) for name, each in gpt.named_parameters()}

    (shared,) = on_ranks(run, ranks=1)
    assert shared
    assert all(found == ("norm" not in name and "router" not in name) for name, found in shared.items())


def test_layers_of_a_later_pipeline_stage_have_their_own_numbers_and_windows(on_ranks):
    config = MegatronConfig(pipeline_model_parallel_size=2)

    def run(_):
        groups = ParallelGroups.join(config)
        gpt = built(
            read_architecture(plain_model("Qwen2", **{**WINDOWS, "max_window_layers": 3}).config), groups, config
        )
        layers = [
            (layer.layer_number, layer.self_attention.core_attention.sliding_window) for layer in gpt.decoder.layers
        ]
        groups.leave()
        return layers, hasattr(gpt, "embedding"), hasattr(gpt, "output_layer")

    first, second = on_ranks(run, ranks=2)
    assert first == ([(1, None), (2, None)], True, False)
    assert second == ([(3, None), (4, 40)], False, True)


def test_the_vocabulary_is_padded_for_tensor_parallel_ranks_with_zeros(on_ranks):
    config = MegatronConfig(tensor_model_parallel_size=2)

    def run(_):
        model = plain_model("Llama")
        groups = ParallelGroups.join(config)
        gpt = built(read_architecture(model.config), groups, config)
        filled(gpt, model, groups)
        weights = gpt.embedding.word_embeddings.weight, gpt.head_weight
        groups.leave()
        return [(tuple(weight.shape), weight[-1].abs().max().item() == 0) for weight in weights]

    first, second = on_ranks(run, ranks=2)
    assert first == [((34, 32), False)] * 2
    assert second == [((34, 32), True)] * 2
    assert padded_vocab_size(read_architecture(transformers.LlamaConfig(**SIZES)), config) == 68


def test_recomputation_gives_the_same_gradients(on_ranks):
    def run(_):
        model, rows = plain_model("Qwen3", head_dim=16), tokens()
        found = []
        for granularity in (None, "full", "selective"):
            config = MegatronConfig(recompute_granularity=granularity)
            groups = ParallelGroups.join(config)
            gpt = built(read_architecture(model.config), groups, config).train()
            filled(gpt, model, groups)
            logits = logits_of(gpt, rows)
            with cpu_compat():
                logits.square().sum().backward()
            found.append([parameter.grad for parameter in gpt.parameters()])
        return [max(map(apart, found[0], other)) for other in found[1:]]

    (differences,) = on_ranks(run, ranks=1)
    assert max(differences) <= 1e-6


def test_the_gradient_of_rows_that_were_read_is_that_of_torchs_embedding(imported):
    from rl_backends.megatron.decoder import read_rows

    own, plain = (torch.nn.Parameter(torch.arange(60.0).view(20, 3)) for _ in range(2))
    own.main_grad = torch.ones(20, 3)  # of microbatches before
    read, gradient = torch.tensor([[3, 19, 3], [0, 7, 19]]), torch.randn(2, 3, 3)
    for rows in (read_rows(read, own), torch.nn.functional.embedding(read, plain)):
        assert torch.equal(rows, plain[read])
        rows.backward(gradient)
    assert own.grad is None
    torch.testing.assert_close(own.main_grad - 1, plain.grad)


def test_what_ranks_cannot_share_is_refused_in_one_error_before_megatron_asserts():
    dense = read_architecture(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 50}))
    config = MegatronConfig(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        sequence_parallel=True,
    )
    with pytest.raises(ModelError) as caught:
        transformer_config(dense, config)
    for named in (
        "num_key_value_heads=2 of the model is no multiple of tensor_model_parallel_size=4",
        "num_hidden_layers=3 of the model cannot be shared out evenly to 2 stages",
        "intermediate_size=50 of the model is no multiple of tensor_model_parallel_size=4",
        "expert_model_parallel_size=2, and the model has no experts",
    ):
        assert named in str(caught.value)


def test_a_mixture_under_tensor_parallelism_needs_sequence_parallelism():
    mixture = read_architecture(transformers.Qwen3MoeConfig(**{**SIZES, **MIXTURE}))
    with pytest.raises(ModelError, match="needs sequence_parallel=True"):
        require_layout(mixture, MegatronConfig(tensor_model_parallel_size=2))
    with pytest.raises(ModelError, match="num_experts=4 of the model is no multiple of expert_model_parallel_size=3"):
        require_layout(mixture, MegatronConfig(expert_model_parallel_size=3))
    two = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ModelError, match="needs expert_model_parallel_size > 1"):
        require_layout(mixture, MegatronConfig(**two))
    require_layout(mixture, MegatronConfig(**two, expert_model_parallel_size=2))


def test_transformer_engine_reads_windows_in_the_configuration():
    fields = {**SIZES, "num_hidden_layers": 4, **WINDOWS}
    architecture = read_architecture(transformers.Qwen2Config(**fields))
    assert transformer_config(architecture, MegatronConfig()).window_size is None
    asked = transformer_config(architecture, MegatronConfig(), transformer_engine=True)
    assert asked.window_size == (39, 0)  # tokens to the left of a token, which sees itself too
    assert asked.window_attn_skip_freq == [0, 0, 1, 1]
    assert asked.cp_comm_type == "all_gather"


def test_transformer_engine_is_never_replaced_without_a_word():
    from rl_backends.megatron.gpt_model import uses_transformer_engine

    with pytest.raises(ValueError, match="transformer_impl='transformer_engine' needs device='cuda'"):
        MegatronConfig(transformer_impl="transformer_engine")
    with pytest.raises(ModelError, match=r"transformer_engine is not installed.*set transformer_impl='local'"):
        uses_transformer_engine(MegatronConfig(device="cuda"))
    assert not uses_transformer_engine(MegatronConfig(device="cuda", transformer_impl="local"))
    assert not uses_transformer_engine(MegatronConfig())


@pytest.mark.parametrize(
    "name", ["apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "gradient_accumulation_fusion"]
)
def test_a_kernel_of_transformer_engine_is_refused_by_name_without_it(name):
    for asked in ({}, {"device": "cuda", "transformer_impl": "local"}):
        with pytest.raises(ValueError, match=f"{name}=True is a kernel of Transformer Engine"):
            MegatronConfig(**{name: True}, **asked)
    MegatronConfig(**{name: True}, device="cuda")


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"num_layers_in_first_pipeline_stage": 3}, [[0, 1, 2], [3, 4, 5, 6, 7]]),
        ({"num_layers_in_last_pipeline_stage": 3}, [[0, 1, 2, 3, 4], [5, 6, 7]]),
        ({"pipeline_model_parallel_layout": "Et*2|t*6L"}, [[0, 1], [2, 3, 4, 5, 6, 7]]),
        ({VP: 2}, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({VP: 4}, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ({VP: 2, "num_layers_in_first_pipeline_stage": 2}, [[0, 4], [1, 2, 3, 5, 6, 7]]),
        ({VP: 2, "pipeline_model_parallel_layout": "Et|t*3|t*2|t*2L"}, [[0, 4, 5], [1, 2, 3, 6, 7]]),
    ],
)
def test_layers_of_stages_are_those_that_are_asked_for(fields, layers):
    assert layers_of_stages(8, MegatronConfig(pipeline_model_parallel_size=2, **fields)) == layers


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_layers_in_first_pipeline_stage": 9}, "cannot be shared out evenly"),
        ({"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4}, "cannot be shared out"),
        ({"pipeline_model_parallel_layout": "Et*2|t*5L"}, "it has 2 stages and 7 layers"),
        ({"pipeline_model_parallel_layout": "E|t*8L"}, "gives stage 0 no layer"),
        ({"pipeline_model_parallel_layout": "tE|t*7L"}, "E first, L last"),
        ({VP: 3}, "a stage 4 layers, which is no multiple of virtual_pipeline_model_parallel_size=3"),
        ({VP: 2, "num_layers_in_first_pipeline_stage": 3}, "a stage 3 layers, which is no multiple"),
        ({VP: 2, "pipeline_model_parallel_layout": "Et*2|t*6L"}, "must have 4 stages with | between them"),
        ({VP: 1}, "must be at least 2 chunks a stage, or None for one"),
        ({VP: 2, "pipeline_model_parallel_size": 1}, "needs pipeline_model_parallel_size > 1"),
    ],
)
def test_layers_that_cannot_be_shared_out_are_refused_with_the_reason(fields, why):
    with pytest.raises(ValueError, match=why):
        layers_of_stages(8, MegatronConfig(**{"pipeline_model_parallel_size": 2, **fields}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU is needed")
@pytest.mark.parametrize("engine", [False, True], ids=["torch", "Transformer Engine"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_on_a_gpu_are_those_of_hugging_face(name, engine, imported):
    from rl_backends.megatron.gpt_model import transformer_engine_available

    if engine and not transformer_engine_available():
        pytest.skip("Transformer Engine is not installed")
    family, fields = MODELS[name]
    config = MegatronConfig(
        device="cuda",
        precision="bfloat16" if engine else "float32",
        transformer_impl="transformer_engine" if engine else "local",
    )
    model = plain_model(family, **fields).cuda()
    groups = ParallelGroups.join(config)
    try:
        gpt = built(read_architecture(model.config), groups, config)
        filled(gpt, model, groups)
        with torch.no_grad():
            rows = tokens().cuda()
            theirs = model(input_ids=rows, use_cache=False).logits
            difference = apart(logits_of(gpt, rows).float(), theirs)
    finally:
        groups.leave()
    assert difference <= (0.1 if engine else 1e-4)
