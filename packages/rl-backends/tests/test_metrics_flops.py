"""Claims about FLOPs: what torch counts when a tiny model runs is what its modules say, masks counted as masks."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_backends.errors import ModelError
from rl_backends.metrics.flops import ModelFlops, attention_widths, decoder_of, peak_flops_per_s, peak_of_this_device

FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Phi3": {},
    "Gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_key_value_heads": 1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None},
}
ROWS, LENGTH, ASKED, HEADS_WIDTH = 3, 12, 20, 32


def tiny(world, family):
    kind = "Gemma3Text" if family == "Gemma3" else family
    if family != "Gemma3":
        model = world.make_model(kind, attn_implementation="eager", **FAMILIES[family])
    else:
        import transformers

        config = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        config = transformers.Gemma3TextConfig(
            num_attention_heads=4, pad_token_id=0, attn_implementation="eager", **config, **FAMILIES[family]
        )
        model = transformers.Gemma3ForCausalLM(config)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # a loop of plain products, which torch knows how to count
    return model


def counted(model, *, backward):
    """By torch: the backbone on all tokens, the head on the asked ones."""
    tokens = torch.randint(1, 67, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        hidden = decoder_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden.flatten(0, 1)[:ASKED])
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_what_torch_counts_less_the_half_of_attention_that_is_masked(world, family):
    model = tiny(world, family)
    flops = ModelFlops.of(model)
    lengths = torch.full((ROWS,), LENGTH)
    asked = torch.tensor([ASKED, 0, 0])
    unmasked = ROWS * LENGTH**2 * sum(each.per_pair for each in flops.attention)  # eager attention computes the square
    seen = sum(each.per_pair * pairs(LENGTH, each.window) for each in flops.attention) * ROWS
    total = float(flops.of_rows(lengths, asked).sum())
    assert total + 3 * (unmasked - seen) == pytest.approx(counted(model, backward=True), rel=0.02)
    forward = ROWS * LENGTH * flops.layers.forward + ASKED * flops.head.forward + unmasked
    assert forward == pytest.approx(counted(model, backward=False), rel=0.02)
    assert sum(each.per_pair for each in flops.attention) == 2 * 2 * (HEADS_WIDTH + HEADS_WIDTH)  # 2 layers, a MAC is 2


def pairs(length, window):
    return sum(min(t, window or length) for t in range(1, length + 1))


def test_a_row_costs_three_forward_passes_and_pairs_within_the_window(world):
    flops = ModelFlops.of(tiny(world, "Gemma3"))
    assert [each.window for each in flops.attention] == [4, None]
    lengths, asked = torch.tensor([1, 3, 9]), torch.tensor([0, 2, 1])
    expected = [
        3
        * (
            length * flops.layers.forward
            + n * flops.head.forward
            + sum(each.per_pair * pairs(length, each.window) for each in flops.attention)
        )
        for length, n in zip(lengths.tolist(), asked.tolist(), strict=True)
    ]
    assert flops.of_rows(lengths, asked).tolist() == pytest.approx(expected, rel=1e-12)
    again = flops.of_rows(lengths, asked, recomputed=True)
    assert again.tolist() == pytest.approx([4 / 3 * each for each in expected], rel=1e-12)


def test_experts_count_with_the_share_that_sees_a_token(world):
    one, two = (
        ModelFlops.of(world.make_model("Qwen3Moe", **{**FAMILIES["Qwen3Moe"], "num_experts_per_tok": k}))
        for k in (1, 2)
    )
    assert two.layers.forward - one.layers.forward == 2 * 3 * 32 * 24 * 2  # layers, matrices, sizes, a MAC is 2


def test_frozen_weights_need_no_gradient_of_their_own(world):
    model = world.make_model("Llama")
    trained = ModelFlops.of(model)
    model.requires_grad_(requires_grad=False)
    frozen = ModelFlops.of(model)
    assert frozen.layers.backward == frozen.head.backward == 0.0
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(requires_grad=True)
    adapters = ModelFlops.of(model)
    assert adapters.layers.backward == adapters.layers.forward + 2 * 32 * 32
    assert trained.layers.backward == 2 * trained.layers.forward
    assert trained.layers.forward == frozen.layers.forward == adapters.layers.forward


def test_weights_on_the_meta_device_tell_the_same(world):
    model = world.make_model("Qwen3")
    assert ModelFlops.of(copy.deepcopy(model).to("meta")) == ModelFlops.of(model)


def test_a_model_that_does_not_tell_is_refused_by_name(world):
    with pytest.raises(ModelError, match=r"Linear has no input embedding"):
        ModelFlops.of(torch.nn.Linear(2, 2))
    model = world.make_model("Llama")
    with pytest.raises(ModelError, match=r"self_attn .LlamaAttention. has no linear layer to the hidden size 33"):
        attention_widths(model.model, 33)
    model.model.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ModelError, match=r"ModuleList holds experts, and no module around it says how many"):
        ModelFlops.of(model)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tfloat32", 156.0),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA L40S", "float32", 91.6),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bfloat16", None),
        ("NVIDIA H300", "bfloat16", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets_or_unknown(name, dtype, tflops):
    assert peak_flops_per_s(name, dtype) == (None if tflops is None else tflops * 1e12)


def test_a_cpu_has_no_peak():
    assert peak_of_this_device(torch.device("cpu"), "float32") is None
