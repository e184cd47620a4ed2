"""Context parallelism against one process that holds whole sequences, and everything that it refuses."""

import pytest
import torch
import transformers
from parallel_plans_cases.models import SHAPE, tiny, tiny_on_meta
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import rl_parallel_plans as plans
from rl_parallel_plans.context_parallel.apply import attention_of_runs, attention_window, check_context_parallel
from rl_parallel_plans.context_parallel.layout import (
    document_lengths,
    in_order,
    layout_of_documents,
    layout_of_positions,
)

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
CASES = "context_parallel:"
# fp32, two layers: what reordered sums may cost, relative to the largest entry.
TOLERANCE = 1e-5
# Lengths that no number of chunks divides, one of a single token, one longer than every window.
DOCUMENTS = [5, 13, 1, 8]
ARCHITECTURES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma3": {"sliding_window": 6},  # of six layers, every sixth sees all tokens
}


def assert_equal_to_one_process(results):
    for result in results:
        assert result["loss_error"] < TOLERANCE
        assert result.get("logits_error", 0) < TOLERANCE
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]


@pytest.mark.parametrize(
    ("length", "held"),
    [(8, [[0, 1, 6, 7], [2, 3, 4, 5]]), (9, [[0, 1, 2, -1, -1, -1], [3, 4, 5, 6, 7, 8]])],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_holds_a_chunk_of_the_head_and_one_of_the_tail(ranks, length, held, dim):
    results = ranks(CASES + "layout", 2, length=length, dim=dim)
    assert [result["held"] for result in results] == held
    assert sorted(p for result in results for p in result["positions"]) == list(range(length + -length % 4))
    for result in results:
        known = zip(result["held"], result["positions"], strict=True)
        assert all(token in (position, -1) for token, position in known)
        assert result["back"]
        assert result["mask_back"]


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "key_heads": 4, "length": 16},
        {"heads": 4, "key_heads": 2, "length": 24},
        {"heads": 3, "key_heads": 1, "length": 4, "value_size": 8, "scale": 0.3},
        {"heads": 4, "key_heads": 2, "length": 40, "window": 3},
        {"heads": 4, "key_heads": 4, "length": 24, "window": 7},
        {"heads": 4, "key_heads": 4, "length": 24, "window": 100},
    ],
)
def test_gathered_attention_equals_attention_over_the_whole_sequence(ranks, shape):
    for errors in ranks(CASES + "attention_parity", 2, **shape):
        assert max(errors) < 1e-14, errors


def test_three_ranks_attend_to_one_another(ranks):
    for errors in ranks(CASES + "attention_parity", 3, heads=2, key_heads=2, length=12):
        assert max(errors) < 1e-14, errors


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "qwen3_moe"])
def test_two_ranks_equal_one_process(ranks, architecture):
    assert_equal_to_one_process(ranks(CASES + "parity", 2, architecture=architecture, shape=[1, 2, 1]))


@pytest.mark.parametrize("cut_as_one", [False, True], ids=["each document by itself", "all documents as one"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_equal_documents_by_themselves(ranks, architecture, cut_as_one):
    options = {"architecture": architecture, "documents": DOCUMENTS, "cut_as_one": cut_as_one, "accumulate": 2}
    assert_equal_to_one_process(ranks(CASES + "parity", 2, shape=[1, 2, 1], **options, **ARCHITECTURES[architecture]))


@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
def test_sliding_windows_reach_over_ranks(ranks, architecture):
    options = {"architecture": architecture, "length": 27, "num_hidden_layers": 6 if architecture == "gemma3" else 2}
    assert_equal_to_one_process(ranks(CASES + "parity", 2, shape=[1, 2, 1], **options, **ARCHITECTURES[architecture]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_over_four_ranks(ranks, architecture):
    options = {"architecture": architecture, "documents": DOCUMENTS, **ARCHITECTURES[architecture]}
    assert_equal_to_one_process(ranks(CASES + "parity", 4, shape=[1, 4, 1], **options))


@pytest.mark.parametrize(
    "architecture",
    ["llama", "gemma3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3", "mistral"))],
)
def test_sequence_parallelism_beside_context_parallelism(ranks, architecture):
    options = {"architecture": architecture, "documents": DOCUMENTS, "sequence_parallel": True, "fsdp": True}
    assert_equal_to_one_process(ranks(CASES + "parity", 4, shape=[1, 2, 2], **options, **ARCHITECTURES[architecture]))


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant", "selective"])
def test_packed_rows_of_several_forwards_are_recomputed_with_their_own_documents(ranks, checkpointing):
    options = {"documents": DOCUMENTS, "checkpointing": checkpointing, "accumulate": 2, "sliding_window": 6}
    assert_equal_to_one_process(ranks(CASES + "parity", 2, architecture="mistral", shape=[1, 2, 1], **options))


@pytest.mark.skipif(RELEASE < (5, 0), reason="experts are lists before transformers 5, and refused")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shape": [1, 2, 2], "experts_over": "cp"}, marks=pytest.mark.slow),
        {"shape": [1, 2, 2], "experts_over": "cp", "sequence_parallel": True},
        {"shape": [1, 2, 2, 1], "experts_over": "ep"},
    ],
)
def test_tokens_experts_and_heads_over_ranks_together(ranks, options):
    options = {"architecture": "qwen3_moe", "documents": DOCUMENTS, "fsdp": True, **options}
    assert_equal_to_one_process(ranks(CASES + "parity", 4, **options))


def test_rows_packed_differently_in_one_batch(ranks):
    assert_equal_to_one_process(ranks(CASES + "rows_packed_differently", 2))


def test_packed_tokens_come_back_in_their_order(ranks):
    assert ranks(CASES + "packed_layout", 2) == [True, True]


def test_padded_rows_and_gradients_that_add_up_over_microbatches(ranks):
    results = ranks(CASES + "parity", 2, architecture="qwen3", shape=[1, 2, 1], length=13, accumulate=3)
    assert_equal_to_one_process(results)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant", "selective"])
def test_recomputed_activations_gather_keys_again_inside_backward(ranks, checkpointing):
    results = ranks(CASES + "parity", 2, architecture="llama", shape=[1, 2, 1], checkpointing=checkpointing)
    assert_equal_to_one_process(results)


def test_a_cache_that_the_model_makes_by_default_changes_nothing(ranks):
    assert_equal_to_one_process(ranks(CASES + "parity", 2, architecture="llama", shape=[1, 2, 1], use_cache=True))


def test_heads_over_one_axis_and_tokens_over_another(ranks):
    assert_equal_to_one_process(ranks(CASES + "parity", 4, architecture="qwen3", shape=[1, 2, 2], length=15))


def test_fsdp_over_rows_and_tokens_sums_their_gradients(ranks):
    results = ranks(CASES + "parity", 4, architecture="qwen3", shape=[2, 2, 1], fsdp=True, accumulate=2)
    assert_equal_to_one_process(results)
    assert all(result["is_fsdp"] for result in results)


def test_fsdp_heads_tokens_and_recomputed_activations_together(ranks):
    options = {"architecture": "qwen3", "fsdp": True, "checkpointing": "non-reentrant", "tied": True}
    assert_equal_to_one_process(ranks(CASES + "parity", 4, shape=[1, 2, 2], **options))


def test_loss_of_whole_sequences_counts_once(ranks):
    assert_equal_to_one_process(ranks(CASES + "loss_of_whole_sequences", 2))


@pytest.mark.parametrize("position", [0, 5, 13])
def test_no_token_sees_a_later_one(ranks, position):
    assert ranks(CASES + "changed_logits", 2, position=position) == [list(range(position, 16))] * 2


def test_layer_costs_one_collective_each_way(ranks):
    each_way = [{"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}]
    assert ranks(CASES + "collectives", 2) == [each_way] * 2


def test_forward_refuses_what_a_rank_cannot_know(ranks):
    for messages in ranks(CASES + "forward_refusals", 2):
        expected = {
            "no positions": "position_ids are missing",
            "positions of the whole": "are not those of rows cut by shard_sequence",
            "positions that begin late": "are not those of rows cut by shard_sequence",
            "positions of three axes": "position_ids of shape (3, 1, 4) are not those of this rank's tokens",
            "other documents": "cu_seq_lens_q is [0, 5, 8] and the position_ids restart at [0] of 8 tokens",
            "mask": "an attention_mask knows only this rank's tokens",
            "labels": "labels would be shifted inside this rank's tokens",
            "images": "pixel_values: context parallelism takes tokens",
            "cache": "holds 8 cached tokens",
            "by position": "3 arguments were passed by position",
            "twice": "LlamaForCausalLM is context parallel over 'cp' already",
            "length": "a sequence of 7 tokens cannot be cut into 2·cp = 4 equal chunks",
            "odd shard": "a shard of 7 tokens is not two chunks of equal length",
            "axis": "the mesh has no axis 'context'",
            "eager": "LlamaAttention did not call torch.nn.functional.scaled_dot_product_attention",
            "mask of a layer": "was given a mask of shape (1, 1, 4, 4)",
            "no mask": "LlamaAttention was not given the attention_mask of its model",
            "borders": "cu_seqlens ends at 7 and the row has 8 tokens",
            "empty document": "so that every document has a token",
            "other shard": "does not belong to cu_seqlens of documents of [3, 5] tokens",
        }
        assert messages.keys() == expected.keys()
        for name, words in expected.items():
            assert words in messages[name], name


def test_attention_that_raises_leaves_torch_as_it_was(ranks):
    assert ranks(CASES + "attention_that_raises_leaves_torch_as_it_was", 2) == [[0, True]] * 2


def test_copy_of_a_model_is_context_parallel_by_itself(ranks):
    assert ranks(CASES + "copied_model", 2) == [True, True]


def test_one_rank_is_the_plain_model(ranks):
    assert ranks(CASES + "one_rank", 1) == [True]


def refusal(model, plan=None):
    with pytest.raises(plans.PlanError) as refused:
        check_context_parallel(model, plan=plan)
    return str(refused.value)


def on_meta(name, **changes):
    """`LlamaConfig` and `LlamaForCausalLM` of the tests' size, without numbers."""
    config_class, model_class = name
    config = getattr(transformers, config_class)(**{**SHAPE, **changes})
    with torch.device("meta"):
        return getattr(transformers, model_class)(config)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3", "qwen3_moe"])
def test_full_causal_attention_over_sdpa_is_taken(architecture):
    check_context_parallel(tiny_on_meta(architecture))


@pytest.mark.parametrize(
    ("name", "changes", "reasons"),
    [
        (
            ("Gemma2Config", "Gemma2ForCausalLM"),
            {"query_pre_attn_scalar": 16},
            ["attn_logit_softcapping=50.0"],
        ),
        (
            ("LlamaConfig", "LlamaForCausalLM"),
            {"sliding_window": 8},
            ["sliding_window=8 and LlamaModel.forward does not read it"],
        ),
        (("GptOssConfig", "GptOssForCausalLM"), {}, ["attention sinks (sinks)", "attn_implementation='eager'"]),
        (("LlamaConfig", "LlamaForSequenceClassification"), {}, ["pools the last token"]),
        (("LlamaConfig", "LlamaForCausalLM"), {"attn_implementation": "eager"}, ["attn_implementation='eager'"]),
        (
            ("BertConfig", "BertModel"),
            {"pad_token_id": 0},
            ["encoder.layer.*", "is_causal" if RELEASE < (5, 0) else "is not causal: encoders"],
        ),
        (
            ("FalconH1Config", "FalconH1ForCausalLM"),
            {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
            ["mamba.conv1d is a convolution over tokens"],
        ),
        (
            ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
            {"num_hidden_layers": 4, "num_experts": 4},
            [
                "has no attention that says by an attribute is_causal",
                "linear_attn.conv1d",
                "layer_types hold linear_attention",
            ],
        ),
    ],
)
def test_what_is_not_full_causal_attention_is_refused_by_name(name, changes, reasons):
    message = refusal(on_meta(name, **changes))
    assert "cannot be context parallel" in message
    for reason in reasons:
        assert reason in message


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_seen_are_refused(kind):
    model = tiny_on_meta("llama")
    model.model.rotary_emb.rope_type = kind
    assert f"model.rotary_emb has rope_type='{kind}'" in refusal(model)


def test_window_that_module_and_config_disagree_about_is_refused():
    model = tiny_on_meta("gemma3", num_hidden_layers=6)
    model.model.layers[0].self_attn.sliding_window = 5
    assert "has sliding_window=5 and the config of its decoder says 8" in refusal(model)


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("llama", {}, [None, None]),
        ("mistral", {"sliding_window": None}, [None, None]),
        ("mistral", {"sliding_window": 6}, [6, 6]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, [None, 6]),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 6}, [None, None]),
        ("phi3", {"sliding_window": 6}, [6, 6]),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}, [6, 6]),
        ("gemma3", {"num_hidden_layers": 6, "sliding_window_pattern": 6}, [8, 8, 8, 8, 8, None]),
        ("olmo3", {"num_hidden_layers": 4}, [8, 8, 8, None]),
    ],
)
def test_window_of_each_layer(architecture, changes, windows):
    model = tiny_on_meta(architecture, **changes)
    check_context_parallel(model)
    paths = [f"model.layers.{number}.self_attn" for number in range(len(windows))]
    assert [attention_window(model, path) for path in paths] == windows


def test_images_and_attention_outside_the_decoder_layers_are_refused():
    model = tiny_on_meta("llama")
    model.config.vision_config = object()
    model.tower = tiny_on_meta("llama", num_hidden_layers=1).model.layers[0]
    message = refusal(model)
    assert "its config has a vision_config" in message
    assert "tower.self_attn (LlamaAttention) is attention outside the decoder layers" in message


def test_module_without_layers_is_refused():
    assert "holds no nn.ModuleList of decoder layers" in refusal(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        *(
            pytest.param(
                "cuda",
                dtype,
                marks=[
                    pytest.mark.gpu,
                    pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels under test are a GPU's"),
                ],
            )
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_attend_as_the_whole_does(device, dtype, key_heads, window):
    """The kernels that run for a chunk (on a GPU flash or efficient ones, without a mask in memory), fwd and bwd."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 512, 64, generator=generator) for heads in (8, key_heads, key_heads))
    weight = torch.randn(2, 8, 512, 64, generator=generator)
    truth = [each.double().requires_grad_() for each in (query, key, value)]
    options = {"enable_gqa": key_heads != 8}
    distance = torch.arange(512)[:, None] - torch.arange(512)
    mask = (distance >= 0) & (distance < (window or 512))
    expected = scaled_dot_product_attention(*truth, attn_mask=mask, **options)
    (expected * weight).sum().backward()
    found = [each.to(device, dtype).requires_grad_() for each in (query, key, value)]
    layout = layout_of_documents([256], rank=0, cp=1)
    output = attention_of_runs(*found, runs=layout.runs, window=window, **options)
    (output * weight.to(device, dtype)).sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    pairs = [(output, expected), *((f.grad, t.grad) for f, t in zip(found, truth, strict=True))]
    for actual, true in pairs:
        assert (actual.detach().double().cpu() - true.detach()).abs().max() < tolerance * true.detach().abs().max()


def test_check_touches_nothing():
    model = tiny("gemma2")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    refusal(model)
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[12], [5, 13, 1, 8], [24, 24], [1, 1, 1]])
def test_documents_are_found_in_the_positions_of_the_ranks(cp, lengths):
    chunks = [-(-length // (2 * cp)) for length in lengths]
    layouts = [layout_of_documents(chunks, rank, cp) for rank in range(cp)]
    row = torch.cat([torch.arange(2 * cp * chunk) for chunk in chunks])
    places = [torch.cat([torch.arange(run.end - run.length, run.end) for run in each.runs]) for each in layouts]
    held = torch.stack([row[each] for each in places])
    assert sorted(torch.cat(places).tolist()) == list(range(len(row)))
    for rank, layout in enumerate(layouts):
        assert torch.equal(in_order(torch.cat(list(held)), layout), row)
        assert layout_of_positions(held[:, None], rank) == (None if len(lengths) == 1 else (layout,))


@pytest.mark.parametrize("cp", [2, 3])
def test_every_rank_attends_to_as_many_keys_whatever_the_documents(cp):
    chunks = [3, 1, 40, 7]
    keys = [
        sum(sum(range(run.end - run.length, run.end)) - (run.first - 1) * run.length for run in layout.runs)
        for layout in (layout_of_documents(chunks, rank, cp) for rank in range(cp))
    ]
    assert len(set(keys)) == 1


def test_borders_of_documents_are_read_from_tensors_and_lists():
    assert (
        document_lengths(9, torch.tensor([0, 4, 9], dtype=torch.int32)) == document_lengths(None, [0, 4, 9]) == [4, 5]
    )
