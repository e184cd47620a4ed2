"""Plans as values: which rule makes them, what they say, what they refuse. On the meta device, without processes."""

import pytest
import torch
import transformers
from parallel_plans_cases.models import tiny, tiny_on_meta
from torch import nn
from torch.distributed.tensor import Shard

from rl_parallel_plans import ParallelPlan, PlanError, ReplicatedParallel, plan_for

LAYER = "model.layers.*"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_decoder_is_recognised_by_its_parts(architecture):
    plan = plan_for(tiny_on_meta(architecture), tp=2)
    assert isinstance(plan, ParallelPlan)
    assert plan.source == "structure"
    assert plan.problems == ()
    assert (f"{LAYER}.self_attn.q_norm" in plan.styles) == (architecture == "qwen3")


def test_family_plan_shards_every_matrix():
    plan = plan_for(tiny_on_meta("qwen3"), tp=2)
    rows = {row.name: row for row in plan.parameters}
    assert all(row.sharded == (len(row.shape) == 2) for row in rows.values())
    assert rows[f"{LAYER}.mlp.down_proj.weight"].local_shape == (64, 48)
    assert rows[f"{LAYER}.self_attn.k_proj.weight"].local_shape == (16, 64)
    assert rows["lm_head.weight"].placement == "Shard(0)"
    assert rows[f"{LAYER}.self_attn.q_norm.weight"].placement == "Replicate"
    assert rows[f"{LAYER}.self_attn.q_norm.weight"].partial_gradient
    assert not rows["model.norm.weight"].partial_gradient


def test_rows_add_up_to_the_model():
    model = tiny_on_meta("llama", dtype=torch.bfloat16).to(torch.bfloat16)
    plan = plan_for(model, tp=2)
    assert sum(row.global_bytes for row in plan.parameters) == sum(p.nbytes for p in model.parameters())
    assert sum(row.count for row in plan.parameters) == len(list(model.parameters()))


def test_largest_piece_of_an_uneven_vocabulary_is_counted():
    plan = plan_for(tiny_on_meta("llama", vocab_size=129), tp=4, custom={"lm_head": "colwise"})
    row = next(row for row in plan.parameters if row.name == "lm_head.weight")
    assert row.local_shape == (33, 64)
    assert row.rank_bytes == 33 * 64 * 4


def test_styles_read_as_what_they_do():
    styles = plan_for(tiny_on_meta("gpt_oss"), tp=2, sequence_parallel=True).styles
    assert (
        repr(styles[f"{LAYER}.self_attn"])
        == "Block(sequence_parallel=True, table={'sinks': Shard(dim=0)}, attention=True)"
    )
    assert repr(styles[f"{LAYER}.self_attn.q_proj"]) == "Colwise(units=4, what='query heads')"
    assert repr(styles[f"{LAYER}.self_attn.o_proj"]) == "Rowwise()"
    assert repr(styles[f"{LAYER}.mlp.router"]) == "ReplicatedParallel(partial_gradient=True)"
    assert repr(styles[f"{LAYER}.mlp.experts"]) == "Experts(intermediate_size=96, transposed=True, interleaved=True)"
    fused = plan_for(tiny_on_meta("phi3"), tp=2).styles[f"{LAYER}.self_attn.qkv_proj"]
    assert repr(fused) == "PackedColwise(sizes=[64, 32, 32], units=[4, 2, 2], what='heads')"


def test_explain_names_rule_placement_bytes_and_what_stays_whole():
    text = plan_for(tiny_on_meta("qwen3"), tp=2).explain()
    assert "source: structure" in text
    assert "passed over: registered: no plan for transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM" in text
    (down,) = [line for line in text.splitlines() if "down_proj" in line]
    expected = "mlp.down_proj.weight 2 Shard(1) [64, 96] [64, 48] 24,576 Rowwise"
    assert down.split() == expected.split()
    whole = 4 * (2 * (64 + 64 + 16 + 16) + 64)  # two norms over the hidden size and two over a head, a final norm
    assert f"whole on every tp rank: {whole / 1024:.1f} KiB" in text
    assert "FSDP units: model.layers.* (2 x Qwen3DecoderLayer), then the rest of the model as one" in text


def test_one_rank_has_nothing_to_shard_and_says_so():
    plan = plan_for(tiny_on_meta("qwen3_moe"), tp=1)
    assert plan.source == "nothing to shard at tp=1"
    assert dict(plan.styles) == {}
    assert "FSDP units: model.layers.* (2 x Qwen3MoeDecoderLayer)" in plan.explain()
    plan.check(tiny_on_meta("qwen3_moe"))


def test_styles_cannot_be_changed_behind_the_plan():
    with pytest.raises(TypeError):
        plan_for(tiny_on_meta("llama"), tp=2).styles["lm_head"] = None


def test_tie_is_part_of_the_plan_and_counted_once():
    model = tiny("llama", tied=True)
    plan = plan_for(model, tp=2)
    assert plan.ties == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "tied: model.embed_tokens.weight = lm_head.weight" in plan.explain()
    assert "lm_head.weight" not in {row.name for row in plan.parameters}


@pytest.mark.parametrize("tp", [0, -2, 2.0])
def test_tp_must_be_a_number_of_ranks(tp):
    with pytest.raises(PlanError, match=r"it must be a whole number of ranks"):
        plan_for(tiny_on_meta("llama"), tp=tp)


def test_sequence_parallel_is_refused_where_only_the_models_own_plan_is_known():
    model = tiny_on_meta("llama")
    model.model.layers[0].extra = nn.Parameter(torch.zeros(64, device="meta"))
    assert plan_for(model, tp=2).source == "Hugging Face tp_plan"
    with pytest.raises(PlanError, match=r"Hugging Face tp_plan: .* it has no sequence parallelism"):
        plan_for(model, tp=2, sequence_parallel=True)


def test_experts_are_asked_for_of_a_model_that_has_them():
    with pytest.raises(PlanError, match=r"ep=2 was asked for and the model has no stacked experts"):
        plan_for(tiny_on_meta("llama"), tp=1, ep=2)
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("experts are lists before transformers 5")
    plan = plan_for(tiny_on_meta("qwen3_moe"), tp=1, ep=3)
    with pytest.raises(PlanError, match=r"experts has 4 experts, which ep=3 does not divide"):
        plan.check(tiny_on_meta("qwen3_moe"))


def test_column_wise_output_projections_are_for_dense_models():
    with pytest.raises(PlanError, match=r"for dense models, and it has experts"):
        plan_for(tiny_on_meta("qwen3_moe"), tp=2, output_projections="colwise")


def test_auxiliary_loss_of_a_router_needs_the_models_own_plan():
    plan = plan_for(tiny_on_meta("qwen3_moe", output_router_logits=True), tp=2)
    assert plan.source == "Hugging Face tp_plan"
    assert "output_router_logits is True" in plan.passed_over[1]


def test_gathered_lm_head_is_a_problem_until_it_is_allowed():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    model, custom = tiny_on_meta("llama"), {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    with pytest.raises(PlanError, match=r"128 logits a token on every rank, and not 64"):
        plan_for(model, tp=2, custom=custom).check(model)
    allowed = plan_for(model, tp=2, custom=custom, allow=["gathered_lm_head"])
    allowed.check(model)
    assert [problem.kind for problem in allowed.problems] == ["gathered_lm_head"]
    with pytest.raises(PlanError, match=r"no such kinds of problem; known are .*'gathered_lm_head'"):
        plan_for(model, tp=2, allow=["everything"])


def test_large_weight_that_no_rule_names_is_a_problem():
    model = tiny_on_meta("llama", intermediate_size=2**15)
    with pytest.raises(PlanError, match=r"mlp.gate_proj.weight \[32768, 64\] is named by no rule"):
        plan_for(model, tp=2, custom={"lm_head": "colwise"}).check(model)


def test_heads_that_do_not_divide_are_all_named_at_once():
    model = tiny_on_meta("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=98)
    plan = plan_for(model, tp=4)
    with pytest.raises(PlanError) as refusal:
        plan.check(model)
    message = str(refusal.value)
    assert f"{LAYER}.self_attn.q_proj has 6 query heads (96 rows, 16 each), which tp=4 does not divide" in message
    assert f"{LAYER}.self_attn.k_proj has 3 key/value heads (48 rows, 16 each)" in message
    assert f"{LAYER}.mlp.up_proj has 98 output features" in message
    assert len(plan.problems) == int(message.split(" problem(s)", maxsplit=1)[0].rsplit(maxsplit=1)[-1])
    assert all(f"PROBLEM: {problem}" in plan.explain() for problem in plan.problems)


def test_head_count_is_checked_even_where_rows_divide():
    model = tiny_on_meta("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    with pytest.raises(PlanError, match=r"k_proj has 3 key/value heads \(48 rows, 16 each\)"):
        plan_for(model, tp=2).check(model)


def test_pattern_without_a_module_is_named():
    model = tiny_on_meta("llama")
    plan = plan_for(model, tp=2, custom={"model.layers.*.mlp.up_projection": "colwise", "lm_head": "colwise"})
    with pytest.raises(PlanError, match=r"'model.layers.\*.mlp.up_projection' \(ColwiseParallel\) matches no module"):
        plan.check(model)


def test_module_under_two_patterns_is_named():
    model = tiny_on_meta("llama")
    plan = plan_for(model, tp=2, custom={"model.layers.*.mlp.up_proj": "colwise", "model.layers.1.mlp.*": "colwise"})
    with pytest.raises(PlanError, match=r"model.layers.\*.mlp.up_proj is matched by .* make the patterns disjoint"):
        plan.check(model)


def test_style_on_a_module_that_it_cannot_shard_is_named():
    model = tiny_on_meta("llama")
    with pytest.raises(PlanError, match=r"model.norm is a LlamaRMSNorm, and ColwiseParallel shards only nn.Linear"):
        plan_for(model, tp=2, custom={"model.norm": "colwise"}).check(model)


def test_norm_that_sees_only_its_ranks_heads_needs_its_gradient_summed():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    model, attention = tiny_on_meta("qwen3"), f"{LAYER}.self_attn"
    projections = {f"{attention}.{name}_proj": ColwiseParallel() for name in "qkv"}
    projections[f"{attention}.o_proj"] = RowwiseParallel()
    with pytest.raises(PlanError, match=r"self_attn.q_norm would see only its rank's heads"):
        plan_for(model, tp=2, custom=projections).check(model)
    norms = {f"{attention}.{name}_norm": ReplicatedParallel(partial_gradient=True) for name in "qk"}
    plan_for(model, tp=2, custom=projections | norms).check(model)


def test_gradient_that_a_plan_of_strings_forgets_is_mended_and_noted():
    strings = dict.fromkeys([f"{LAYER}.self_attn.{name}_proj" for name in "qkv"], "colwise")
    plan = plan_for(tiny_on_meta("qwen3"), tp=2, custom=strings | {f"{LAYER}.self_attn.o_proj": "rowwise"})
    assert f"{LAYER}.self_attn.q_norm" in plan.styles
    assert any("q_norm" in note for note in plan.notes)
    assert any(note in plan.explain() for note in plan.notes)


def test_plan_that_would_part_tied_weights_is_refused():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    model = tiny("llama", tied=True)
    custom = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    match = r"model.embed_tokens.weight: Replicate, lm_head.weight: Shard\(0\)\), which parts them"
    with pytest.raises(PlanError, match=match):
        plan_for(model, tp=2, custom=custom).check(model)


@pytest.mark.parametrize("tp", [1, 2])
def test_tie_that_the_config_promises_and_the_model_lost_is_found(tp):
    model = tiny("llama", tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(PlanError, match=r"tie_word_embeddings is True, but lm_head.weight and .* are two parameters"):
        plan_for(model, tp=tp).check(model)


def test_model_that_no_rule_knows_is_refused_with_every_reason():
    with pytest.raises(PlanError) as refusal:
        plan_for(nn.Sequential(nn.Linear(4, 4)), tp=2)
    message = str(refusal.value)
    assert "registered: no plan for torch.nn.modules.container.Sequential" in message
    assert "structure: it holds no nn.ModuleList of decoder layers" in message
    assert "Hugging Face tp_plan: torch.nn.modules.container.Sequential has no tp_plan" in message
    assert "pass custom=" in message


def _without_tp_plan(model):
    """The model's class without its Hugging Face plan, so that only the structure can answer."""
    model.__class__ = type("Renamed", (type(model),), {"tp_plan": None})
    return model


def _extra_parameter(model):
    model.model.layers[1].self_attn.scale_of_heads = nn.Parameter(torch.zeros(4))
    return r"attention \(Qwen3Attention\) has a parameter scale_of_heads \[4\], which no rule knows"


def _parameter_of_the_layer(model):
    model.model.layers[1].scale = nn.Parameter(torch.zeros(64))
    return r"its Qwen3DecoderLayer itself holds parameters \['scale'\]"


def _another_kind_of_layer(model):
    model.model.layers[1].mlp.up_proj = nn.Bilinear(2, 2, 2)
    return r"Qwen3DecoderLayer.mlp is a Qwen3MLP with the parts .*, which no rule knows"


def _norm_over_two_heads(model):
    model.model.layers[0].self_attn.q_norm = nn.RMSNorm(32)
    return r"self_attn.q_norm has parameters \[\(32,\)\]; known are \[16\] over one head, \[64\] over all"


def _quantized(model):
    model.lm_head.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
    return r"it is quantized: lm_head.weight is torch.int8"


@pytest.mark.parametrize(
    "change", [_extra_parameter, _parameter_of_the_layer, _another_kind_of_layer, _norm_over_two_heads, _quantized]
)
def test_structure_with_one_unknown_part_is_refused(change):
    model = _without_tp_plan(tiny("qwen3"))
    match = change(model)
    with pytest.raises(PlanError, match=match):
        plan_for(model, tp=2)


def test_bare_backbone_has_a_plan_too():
    plan = plan_for(tiny_on_meta("qwen3").model, tp=2)
    assert plan.source == "structure"
    assert "layers.*.self_attn.q_proj" in plan.styles
    assert "embed_tokens" in plan.styles


class Around(nn.Module):
    """A model around others, with the methods by which a Hugging Face model names its embedding and its head."""

    def __init__(self, embedding, head=None, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.get_input_embeddings = lambda: self.get_submodule(embedding)
        self.get_output_embeddings = lambda: None if head is None else self.get_submodule(head)


def test_head_of_the_language_model_that_a_model_holds_is_the_head():
    """Nemotron-H Omni names an embedding and no head: its logits are those of the model inside."""
    model = Around("text.model.embed_tokens", text=tiny_on_meta("llama"), vision=nn.Linear(8, 8))
    head = plan_for(model, tp=2).styles["text.lm_head"]
    assert (head.output_layouts, head.use_local_output) == ((Shard(-1),), False)


def test_several_embeddings_and_heads_are_refused_and_promise_no_tie():
    """MusicGen has an embedding and a head for each codebook."""
    lists = {name: nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for name in ("embed_tokens", "lm_heads")}
    model = Around("embed_tokens", "lm_heads", layers=tiny_on_meta("llama").model.layers, **lists)
    model.config = transformers.LlamaConfig(tie_word_embeddings=True)
    assert plan_for(model, tp=1).problems == ()
    with pytest.raises(PlanError, match=r"its input embedding embed_tokens is a ModuleList and not an nn\.Emb"):
        plan_for(model, tp=2)


def test_attention_that_reshapes_to_the_features_of_its_input_is_refused():
    with torch.device("meta"):
        model = transformers.TrOCRForCausalLM(transformers.TrOCRConfig(decoder_layers=1))
    with pytest.raises(PlanError, match=r"TrOCRAttention\.forward gives the output of its heads the features of its"):
        plan_for(model, tp=2)


def test_layers_spread_over_several_lists_are_not_cut_along_the_sequence():
    """XLM calls attention, norms and feed-forwards by turns, each from a list of its own."""
    with torch.device("meta"):
        model = transformers.XLMWithLMHeadModel(transformers.XLMConfig(n_layers=2))
    assert plan_for(model, tp=2).source == "structure"
    with pytest.raises(PlanError, match=r"calls items of attentions, layer_norm1, layer_norm2 between those of ffns"):
        plan_for(model, tp=2, sequence_parallel=True)


def test_single_module_after_the_last_layer_is_no_list_between_layers():
    """BLT's cross-attention, of which there is one."""

    class Decoder(nn.Module):
        def forward(self, hidden):
            for index, layer in enumerate(self.layers):
                hidden = layer(hidden)
                if index == len(self.layers) - 1:
                    hidden = self.others[0](hidden)
            return hidden

    for others in (1, 2):
        decoder = Decoder()
        llama = tiny_on_meta("llama").model
        decoder.embed_tokens, decoder.layers = llama.embed_tokens, llama.layers
        decoder.others = nn.ModuleList(nn.Linear(64, 64) for _ in range(others))
        if others == 1:
            assert plan_for(decoder, tp=2, sequence_parallel=True).source == "structure"
        else:
            with pytest.raises(PlanError, match="calls items of others between those of layers"):
                plan_for(decoder, tp=2, sequence_parallel=True)
