"""Claims about packed rows: they are computed as if alone, nothing leaks between them, what would is refused."""

import pytest
import torch
from torch import nn

from rl_backends.batching.microbatches import make_inputs, make_shared_inputs
from rl_backends.errors import ModelError
from rl_backends.packing.attention import packed_attention
from rl_backends.packing.enable import enable_packing

FAMILIES = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Qwen3": ("Qwen3", {}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Mistral, windows": ("Mistral", {"sliding_window": 5}),
    "Gemma2, capped scores and windows": ("Gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "Gemma3, windows": (
        "Gemma3",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "Phi3": ("Phi3", {"sliding_window": None}),
    "Qwen3Moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "GptOss, sinks and windows": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "attn_implementation": "eager"},
    ),
}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="packed attention's CUDA kernel needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


def make(world, name, **overrides):
    family, config = FAMILIES[name]
    if family != "Gemma3":
        return world.make_model(family, **config, **overrides).eval()
    import transformers

    shape = world.make_model("Qwen3").config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    heads = ("num_attention_heads", "num_key_value_heads")
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(
        **{name: shape[name] for name in (*names, *heads)}, attn_implementation="sdpa", **config, **overrides
    )
    model = transformers.Gemma3ForCausalLM(text)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def decoder(model):
    """Where transformers before 5 says base_model of Gemma 3, it means the whole."""
    return model.model


def rows_of(world, lengths=(9, 9, 3, 1, 12, 12, 5)):
    examples = world.make_examples(rows=len(lengths))
    lengths = torch.tensor(lengths)
    trainable = (torch.arange(examples.tokens.shape[1]) < lengths[:, None]) & (torch.arange(13) > 0)
    return examples.tokens, lengths, trainable


def packed_hidden(model, tokens, lengths, trainable):
    """The hidden states of each row [T, H], from one pack."""
    inputs = make_inputs(tokens, lengths, trainable, layout="packed").to(next(model.parameters()).device)
    starts, longest = inputs.cu_seq_lens, inputs.longest
    out = decoder(model)(
        input_ids=inputs.tokens,
        position_ids=inputs.position_ids,
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
    )
    return out.last_hidden_state[0].split(lengths.tolist())


def rows_alone(model, tokens, lengths):
    device = next(model.parameters()).device
    return [
        decoder(model)(input_ids=row[None, :length].to(device), use_cache=False).last_hidden_state[0]
        for row, length in zip(tokens, lengths.tolist(), strict=True)
    ]


def gradients(model, hidden):
    """Of a sum that weighs every number of every row differently."""
    total = sum((row * torch.linspace(-1, 1, row.numel(), device=row.device).view_as(row)).sum() for row in hidden)
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_rows_equal_rows_alone_in_values_and_gradients(world, name):
    model = make(world, name)
    tokens, lengths, trainable = rows_of(world)
    alone = rows_alone(model, tokens, lengths)
    wanted = gradients(model, alone)
    enable_packing(model)
    packed = packed_hidden(model, tokens, lengths, trainable)
    for row, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)
    same_to_rounding(gradients(model, packed), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_share_what_they_begin_with_equal_rows_alone_in_values_and_gradients(world, name):
    model = make(world, name)
    tokens, lengths, trainable = rows_of(world)
    tokens[1, :6], tokens[4, :8] = tokens[0, :6], tokens[0, :8]
    tokens[5, :5] = tokens[6, :5]  # of row 6 it is all
    alone = [row[:-1] for row in rows_alone(model, tokens, lengths)]  # the last token of a row is before none
    wanted = gradients(model, alone)
    enable_packing(model)
    inputs = make_shared_inputs(tokens, lengths, trainable)
    assert inputs.tokens.shape[1] == sum(lengths) - 6 - 8 - 5
    hidden = decoder(model)(**inputs.as_arguments(), use_cache=False).last_hidden_state[0]
    at = torch.full(tokens.shape, -1)
    at[:, :-1].masked_scatter_(trainable[:, 1:], inputs.at)
    found = [hidden[places[: length - 1]] for places, length in zip(at, lengths.tolist(), strict=True)]
    for row, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)
    same_to_rounding(gradients(model, found), wanted)


def same_to_rounding(found, wanted):
    scale = max(gradient.norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * scale, name


def bitwise_after_another_row_changed(world, model, *, device, dtype):
    """Hidden states and input gradients of all rows but one, before and after every token of that one changes."""
    model = model.to(device=device, dtype=dtype)
    enable_packing(model)
    tokens, lengths, trainable = rows_of(world)
    other = tokens.clone()
    other[2] = (tokens[2] + 1 + torch.arange(13)) % 60 + 3
    assert not (tokens[2] == other[2]).any()
    found = []
    for each in (tokens, other):
        embedded = []
        handle = decoder(model).embed_tokens.register_forward_hook(lambda _m, _a, out: embedded.append(out) or out)  # noqa: B023
        hidden = packed_hidden(model, each, lengths, trainable)
        handle.remove()
        total = sum(row.float().sum() for row in hidden)
        [gradient] = torch.autograd.grad(total, embedded)
        found.append((hidden, gradient[0].split(lengths.tolist())))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_changed_row_changes_no_bit_of_its_neighbours(world, name, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    (hidden, gradient), (again, gradient_again) = bitwise_after_another_row_changed(
        world, make(world, name), device=device, dtype=dtype
    )
    assert not torch.equal(hidden[2], again[2])
    for row in (0, 1, 3, 4, 5, 6):
        if name == "Qwen3Moe" or name.startswith("GptOss"):  # an expert's matrix product has other tokens beside these
            torch.testing.assert_close(hidden[row], again[row], rtol=1e-5, atol=1e-5)
            continue
        assert torch.equal(hidden[row], again[row])
        if device == "cpu":  # the kernel's backward adds in any order
            assert torch.equal(gradient[row], gradient_again[row])


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_rows_equal_rows_alone_to_its_precision(world, device):
    model = make(world, "Mistral, windows").to(device=device, dtype=torch.bfloat16)
    tokens, lengths, trainable = rows_of(world)
    alone = rows_alone(model, tokens, lengths)
    wanted = gradients(model, alone)
    enable_packing(model)
    packed = packed_hidden(model, tokens, lengths, trainable)
    for row, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(row, expected, rtol=0.05, atol=0.05)
    for key, gradient in gradients(model, packed).items():
        assert (gradient - wanted[key]).norm() <= 0.03 * wanted[key].norm()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_are_told_where_rows_begin_too(world, mode):
    from rl_parallel_plans import apply_activation_checkpointing

    tokens, lengths, trainable = rows_of(world)
    model = make(world, "Qwen3")
    wanted = gradients(model, rows_alone(model, tokens, lengths))
    enable_packing(model)
    apply_activation_checkpointing(model, mode)
    found = gradients(model, packed_hidden(model, tokens, lengths, trainable))
    same_to_rounding(found, wanted)


def test_a_call_that_does_not_say_where_rows_begin_is_refused(world):
    model = make(world, "Qwen3")
    enable_packing(model)
    with pytest.raises(ModelError, match="Qwen3Attention was called without cu_seq_lens_q and max_length_q"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"is_causal": False}, "is_causal=False"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
    ],
)
def test_what_the_attention_would_leave_out_is_refused(given, named):
    heads, starts = torch.zeros(1, 2, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
    mask = given.pop("attention_mask", None)
    with pytest.raises(ModelError, match=f"asks for {named}, which packed attention does not do"):
        packed_attention(nn.Identity(), heads, heads, heads, mask, cu_seq_lens_q=starts, max_length_q=3, **given)


def refused(model):
    with pytest.raises(ModelError) as caught:
        enable_packing(model)
    assert "cannot be packed" in str(caught.value)
    return str(caught.value)


def test_linear_attention_and_convolutions_are_refused_with_every_reason(world):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    with torch.device("meta"):
        message = refused(transformers.Qwen3NextForCausalLM(config))
    assert "layer_types hold linear_attention" in message
    assert "model.layers.*.linear_attn.conv1d (Conv1d) is a convolution over tokens" in message


def test_mamba_is_refused_by_name():
    import transformers

    config = transformers.MambaConfig(vocab_size=67, hidden_size=32, num_hidden_layers=2)
    with torch.device("meta"):
        message = refused(transformers.MambaForCausalLM(config))
    assert "backbone.layers.* (MambaBlock) has no attention that says" in message


def test_attention_outside_of_the_interface_is_refused_by_name():
    import transformers

    config = transformers.BloomConfig(vocab_size=67, hidden_size=32, n_layer=2, n_head=4)
    with torch.device("meta"):
        message = refused(transformers.BloomForCausalLM(config))
    assert "transformer.h.* (BloomBlock)" in message


def test_frequencies_that_depend_on_the_length_are_refused_by_name(world):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    both = {"rope_scaling": scaling} if not hasattr(make(world, "Llama").config, "rope_parameters") else {}
    both = both or {"rope_parameters": {**scaling, "rope_theta": 1e4}}
    assert "rotary_emb has rope_type='dynamic'" in refused(make(world, "Llama", **both))


def test_chunked_attention_is_refused_by_name():
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2,
    )  # fmt: skip
    with torch.device("meta"):
        message = refused(transformers.Llama4ForCausalLM(config))
    assert "layer_types hold chunked_attention" in message


def test_images_are_refused_by_name():
    import transformers

    text = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        message = refused(transformers.Gemma3ForConditionalGeneration(config))
    assert "its config has a vision_config" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: setattr(model.config, "alibi", True), "alibi=True, which adds a bias"),
        (lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False), "self_attn .* is not causal"),
        (lambda model: setattr(model.model.layers[1].self_attn, "indexer", nn.Linear(2, 2)), "indexer .* mixes tokens"),
        (
            lambda model: setattr(model.model.layers[1], "short_conv", nn.Conv1d(2, 2, 2)),
            "is a convolution over tokens",
        ),
        (lambda model: setattr(model.model, "mixer", nn.GRU(2, 2)), r"mixer \(GRU\) stands beside the layers"),
        (lambda model: setattr(model.config, "sliding_window", 4), "a sliding window that it does not hand on"),
        (
            lambda model: model.model.layers[1].self_attn.register_parameter("sinks", nn.Parameter(torch.zeros(4))),
            "attention sinks that it does not hand on",
        ),
    ],
)
def test_each_way_to_mix_tokens_is_refused_by_name(world, change, named):
    model = make(world, "Llama")
    change(model)
    with pytest.raises(ModelError, match=named):
        enable_packing(model)
    assert model.config._attn_implementation == "sdpa"  # refused before anything is changed


def test_a_model_without_layers_is_refused_by_name():
    assert "no nn.ModuleList of decoder layers" in refused(nn.Linear(2, 2))
