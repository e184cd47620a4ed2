"""Low-rank adapters inside the linear layers of a sharded block: gradients of A and B on two ranks against one."""

import pytest
from parallel_plans_cases.adapters import adapted

import rl_parallel_plans as plans

TOLERANCE = 1e-5


def assert_equal_to_one_rank(results):
    for result in results:
        assert result["source"] == "structure"
        assert result["logits_error"] < TOLERANCE
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert any("lora_A" in name for name in result["gradient_errors"])
        found, truth = result["norms"]
        assert found == pytest.approx(truth, rel=1e-5)
        assert result["exported"]


@pytest.mark.parametrize(
    ("architecture", "sequence_parallel"),
    [
        ("llama_bias", True),
        ("phi3", False),
        ("gemma3", True),
        ("qwen3_moe", True),
        ("deepseek_v3", False),
        *(
            pytest.param(architecture, cut, marks=pytest.mark.slow)
            for architecture, cut in (
                ("llama_bias", False),
                ("phi3", True),
                ("gemma3", False),
                ("qwen3_moe", False),
                ("deepseek_v3", True),
            )
        ),
    ],
)
def test_adapters_on_two_ranks_equal_one(ranks, architecture, sequence_parallel):
    results = ranks("adapters:parity", 2, architecture=architecture, sequence_parallel=sequence_parallel)
    assert_equal_to_one_rank(results)


def test_gradients_of_adapters_are_summed_once_over_microbatches_and_recomputation(ranks):
    results = ranks("adapters:parity", 2, architecture="qwen3", accumulate=3, checkpointing=True, tied=True)
    assert_equal_to_one_rank(results)


def test_layers_with_and_without_adapters_stand_side_by_side(ranks):
    assert_equal_to_one_rank(ranks("adapters:parity", 2, architecture="llama", only="1.self_attn"))


def test_plan_says_how_each_part_of_an_adapter_lies():
    plan = plans.plan_for(adapted("phi3"), tp=2)
    rows = {row.name.removeprefix("model.layers.*."): row for row in plan.parameters}
    fused, output = "self_attn.qkv_proj", "self_attn.o_proj"
    assert rows[f"{fused}.base_layer.weight"].reordered
    assert rows[f"{fused}.lora_B.default.weight"].reordered  # its rows are those of the fused weight
    assert rows[f"{fused}.lora_A.default.weight"].partial_gradient
    assert rows[f"{output}.lora_A.default.weight"].placement == "Shard(1)"
    assert rows[f"{output}.lora_B.default.weight"].partial_gradient
    bare = plans.plan_for(adapted("phi3", only="nothing"), tp=2)
    assert plan.collectives == bare.collectives  # an adapter adds no collective


def test_looking_at_a_model_with_adapters_leaves_it_as_it_is():
    model = adapted("llama")
    before = [(name, id(module)) for name, module in model.named_modules()]
    plans.plan_for(model, tp=2)
    assert [(name, id(module)) for name, module in model.named_modules()] == before


def test_style_that_has_no_rule_for_an_adapter_is_refused_by_name():
    with pytest.raises(plans.PlanError, match=r"o_proj has an adapter, and is sharded by GatheredColwise"):
        plans.plan_for(adapted("llama"), tp=2, output_projections="colwise")
