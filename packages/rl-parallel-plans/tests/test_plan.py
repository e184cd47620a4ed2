"""Plans as values: which rule makes them, what they say, what they refuse. On the meta device, without processes."""

import pytest
import torch
from parallel_plans_cases.models import tiny, tiny_on_meta
from torch import nn

from rl_parallel_plans import ParallelPlan, PlanError, plan_for

LAYER = "model.layers.*"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_llama_family_is_recognised_by_its_parts(architecture):
    plan = plan_for(tiny_on_meta(architecture), tp=2)
    assert isinstance(plan, ParallelPlan)
    assert plan.source == "structure: Llama family"
    assert plan.problems == ()
    assert (f"{LAYER}.self_attn.q_norm" in plan.styles) == (architecture == "qwen3")


def test_family_plan_shards_every_matrix():
    plan = plan_for(tiny_on_meta("qwen3"), tp=2)
    rows = {row.name: row for row in plan.parameters}
    assert all(row.sharded == (len(row.shape) == 2) for row in rows.values())
    assert rows[f"{LAYER}.mlp.down_proj.weight"].local_shape == (64, 48)
    assert rows[f"{LAYER}.self_attn.k_proj.weight"].local_shape == (16, 64)
    assert rows["lm_head.weight"].placement == "Shard(0)"
    assert rows[f"{LAYER}.self_attn.q_norm.weight"].placement == "Replicate, gradient summed"
    assert rows["model.norm.weight"].placement == "Replicate"


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


def test_explain_names_rule_placement_bytes_and_what_stays_whole():
    text = plan_for(tiny_on_meta("qwen3"), tp=2).explain()
    assert "source: structure: Llama family" in text
    assert "passed over: registered: no plan for transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM" in text
    (down,) = [line for line in text.splitlines() if "down_proj" in line]
    assert down.split() == f"{LAYER}.mlp.down_proj.weight 2 Shard(1) [64, 96] [64, 48] float32 24,576".split()
    whole = 4 * (2 * (64 + 64 + 16 + 16) + 64)  # two norms over the hidden size and two over a head, a final norm
    assert f"whole on every rank: {whole / 1024:.1f} KiB" in text
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


def test_sequence_parallel_is_refused_with_reason_and_remedy():
    with pytest.raises(PlanError, match=r"not offered by this version.*sequence_parallel=False"):
        plan_for(tiny_on_meta("llama"), tp=2, sequence_parallel=True)


def test_heads_that_do_not_divide_are_all_named_at_once():
    model = tiny_on_meta("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96, intermediate_size=98)
    plan = plan_for(model, tp=4)
    with pytest.raises(PlanError) as refusal:
        plan.check(model)
    message = str(refusal.value)
    assert f"{LAYER}.self_attn.q_proj has 6 query heads (96 rows, 16 a head), which tp=4 does not divide" in message
    assert f"{LAYER}.self_attn.k_proj has 3 key/value heads (48 rows, 16 a head)" in message
    assert f"{LAYER}.mlp.down_proj (RowwiseParallel) has 98 features" in message
    assert len(plan.problems) == int(message.split(" problem(s)", maxsplit=1)[0].rsplit(maxsplit=1)[-1])
    assert all(f"PROBLEM: {problem}" in plan.explain() for problem in plan.problems)


def test_head_count_is_checked_even_where_rows_divide():
    model = tiny_on_meta("llama", num_key_value_heads=1)
    with pytest.raises(PlanError, match=r"k_proj has 1 key/value heads \(16 rows, 16 a head\)"):
        plan_for(model, tp=2).check(model)


def test_pattern_without_a_module_is_named():
    model = tiny_on_meta("llama")
    plan = plan_for(model, tp=2, custom={"model.layers.*.mlp.up_projection": "colwise", "lm_head": "colwise"})
    with pytest.raises(PlanError, match=r"'model.layers.\*.mlp.up_projection' \(ColwiseParallel\) matches no module"):
        plan.check(model)


def test_module_under_two_patterns_is_named():
    model = tiny_on_meta("llama")
    plan = plan_for(model, tp=2, custom={"model.layers.*.mlp.up_proj": "colwise", "model.layers.1.mlp.*": "colwise"})
    with pytest.raises(PlanError, match=r"model.layers.1.mlp.up_proj is matched by .* make the patterns disjoint"):
        plan.check(model)


def test_style_on_a_module_that_it_cannot_shard_is_named():
    model = tiny_on_meta("llama")
    with pytest.raises(PlanError, match=r"model.norm is a LlamaRMSNorm, and ColwiseParallel shards only nn.Linear"):
        plan_for(model, tp=2, custom={"model.norm": "colwise"}).check(model)


def test_norm_that_sees_only_its_ranks_heads_needs_its_gradient_summed():
    model = tiny_on_meta("qwen3")
    colwise = dict.fromkeys([f"{LAYER}.self_attn.{name}_proj" for name in "qkv"], "colwise")
    rowwise = {f"{LAYER}.self_attn.o_proj": "rowwise"}
    with pytest.raises(PlanError, match=r"self_attn.q_norm would see only its rank's heads"):
        plan_for(model, tp=2, custom=colwise | rowwise).check(model)
    norms = dict.fromkeys([f"{LAYER}.self_attn.{name}_norm" for name in "qk"], "replicated_with_grad_allreduce")
    plan_for(model, tp=2, custom=colwise | rowwise | norms).check(model)


def test_plan_that_would_part_tied_weights_is_refused():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel

    model = tiny("llama", tied=True)
    custom = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    match = r"model.embed_tokens.weight: untouched, lm_head.weight: Shard\(0\)\), which parts them"
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
    assert "structure: Llama family: it holds no nn.ModuleList of decoder layers" in message
    assert "Hugging Face tp_plan: torch.nn.modules.container.Sequential has no tp_plan" in message
    assert "pass custom=" in message


def _without_tp_plan(model):
    """The model's class without its Hugging Face plan, so that only the structure can answer."""
    model.__class__ = type("Renamed", (type(model),), {"tp_plan": None})
    return model


def _extra_parameter(model):
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    return r"it has a parameter model.layers.\*.self_attn.sinks, which the family has not"


def _layer_without_norm(model):
    del model.model.layers[0].post_attention_layernorm
    return r"model.layers.\*.post_attention_layernorm is there 1 times, and 2 were expected"


def _another_kind_of_layer(model):
    model.model.layers[1].mlp.up_proj = nn.Bilinear(2, 2, 2)
    return r"model.layers.\*.mlp.up_proj is a Bilinear and not an nn.Linear"


def _norm_over_all_heads(model):
    model.model.layers[0].self_attn.q_norm = nn.RMSNorm(64)
    model.model.layers[1].self_attn.q_norm = nn.RMSNorm(64)
    return r"self_attn.q_norm spans \(64,\) features and one head has 16"


def _quantized(model):
    model.lm_head.weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
    return r"lm_head is quantized"


@pytest.mark.parametrize(
    "change", [_extra_parameter, _layer_without_norm, _another_kind_of_layer, _norm_over_all_heads, _quantized]
)
def test_structure_that_differs_in_one_part_is_not_the_family(change):
    model = _without_tp_plan(tiny("qwen3"))
    match = change(model)
    with pytest.raises(PlanError, match=match):
        plan_for(model, tp=2)


def test_bare_backbone_has_a_plan_too():
    plan = plan_for(tiny_on_meta("qwen3").model, tp=2)
    assert plan.source == "structure: Llama family"
    assert "layers.*.self_attn.q_proj" in plan.styles
    assert "embed_tokens" in plan.styles
