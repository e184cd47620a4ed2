"""The models' own plans, over the releases of transformers that the matrix names."""

import pytest
import transformers
from parallel_plans_cases.models import tiny, tiny_on_meta
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from rl_parallel_plans import PlanError, ReplicatedParallel, get_hf_tp_plan, plan_for, translate_parallel_style

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))


@pytest.mark.parametrize("name", ["colwise_gather_output", "colwise_rep"])
def test_gathered_columns_leave_a_whole_output(name):
    style = translate_parallel_style(name)
    assert isinstance(style, ColwiseParallel)
    assert style.output_layouts == (Replicate(),)


@pytest.mark.parametrize("name", ["rowwise_split_input", "rowwise_rep", "embedding_rowwise"])
def test_split_rows_take_a_whole_input(name):
    style = translate_parallel_style(name)
    assert isinstance(style, RowwiseParallel)
    assert style.input_layouts == (Replicate(),)


def test_plain_styles_are_torchs_own():
    assert translate_parallel_style("colwise").output_layouts == (Shard(-1),)
    assert translate_parallel_style("rowwise").input_layouts == (Shard(-1),)
    assert translate_parallel_style("replicated_with_grad_allreduce").partial_gradient


def test_every_translation_is_a_new_object():
    assert translate_parallel_style("colwise") is not translate_parallel_style("colwise")


@pytest.mark.parametrize(
    "name", ["packed_colwise", "moe_tp_experts", "mla_kv_a_proj", "sequence_parallel", "local", ""]
)
def test_style_without_exact_equivalent_is_refused(name):
    with pytest.raises(PlanError, match=f"Hugging Face style '{name}' has no exact equivalent in torch"):
        translate_parallel_style(name)


@pytest.mark.parametrize("tied", [False, True])
def test_own_plan_ends_in_a_sharded_head_and_an_embedding_tied_to_it(tied):
    model = tiny("phi3", tied=tied)
    plan = get_hf_tp_plan(model)
    assert plan["model.layers.*.self_attn.qkv_proj"].output_layouts == (Replicate(),)
    assert plan["lm_head"].output_layouts == (Shard(-1),)
    assert not plan["lm_head"].use_local_output
    assert not tied or isinstance(plan["model.embed_tokens"], RowwiseParallel)
    assert not any(pattern.startswith("layers.") for pattern in plan)
    plan_for(model, tp=2).check(model)


def test_structure_that_is_not_the_family_falls_to_the_own_plan_and_says_why():
    plan = plan_for(tiny_on_meta("phi3"), tp=2)
    assert plan.source == "Hugging Face tp_plan"
    assert any("structure: Llama family: model.layers.*." in reason for reason in plan.passed_over)


def test_own_plan_that_forgets_to_sum_a_norms_gradient_is_refused():
    model = tiny_on_meta("gemma3")
    plan = plan_for(model, tp=2)
    if RELEASE < (5, 5):  # the release that added the style
        with pytest.raises(PlanError, match="q_norm would see only its rank's heads"):
            plan.check(model)
    else:
        assert isinstance(plan.styles["model.layers.*.self_attn.q_norm"], ReplicatedParallel)
        plan.check(model)


@pytest.mark.skipif(RELEASE < (5, 2), reason="experts are separate linear layers before transformers 5.2")
def test_untranslatable_string_is_refused_with_model_pattern_and_release():
    with pytest.raises(PlanError) as refusal:
        plan_for(tiny_on_meta("qwen3_moe"), tp=2)
    message = str(refusal.value)
    assert "Qwen3MoeForCausalLM, pattern 'model.layers.*.mlp.experts.gate_up_proj'" in message
    assert f"(transformers {transformers.__version__})" in message
    assert "'packed_colwise'" in message


def test_model_without_a_plan_is_refused():
    model = tiny_on_meta("llama")
    model.__class__ = type("Bare", (type(model),), {"tp_plan": None})
    with pytest.raises(PlanError, match=r"Bare has no tp_plan of its own"):
        get_hf_tp_plan(model)
