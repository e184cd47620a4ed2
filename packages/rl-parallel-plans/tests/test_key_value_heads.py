"""Fewer key/value heads than ranks: each is that of a group of ranks, and numbers and weights are those of one rank."""

import pytest
from parallel_plans_cases.models import tiny_on_meta

from rl_parallel_plans import plan_for

TOLERANCE = 1e-5
CASES = [
    ("llama", 2, {"num_key_value_heads": 1}),
    ("gpt_oss", 2, {"num_key_value_heads": 1}),
    ("phi3", 4, {"num_key_value_heads": 2, "num_attention_heads": 8}),
    ("qwen3_moe", 4, {"num_key_value_heads": 1}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama_bias", 2, {"num_key_value_heads": 1}),
            ("qwen3", 4, {"num_key_value_heads": 2, "num_attention_heads": 8}),
            ("cohere", 4, {"num_key_value_heads": 2, "num_attention_heads": 8}),
            ("phi3", 2, {"num_key_value_heads": 1}),
        )
    ),
]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("architecture", "tp", "shape"), CASES)
def test_logits_and_gradients_are_those_of_one_rank(ranks, architecture, tp, shape, sequence_parallel):
    for result in ranks(
        "tp_parity", tp, architecture=architecture, sequence_parallel=sequence_parallel, accumulate=2, **shape
    ):
        assert result["source"] == "structure"
        assert result["logits_error"] < TOLERANCE
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert result["gradients_placed_otherwise"] == []
        assert result["local_bytes"] == result["planned_bytes"]


@pytest.mark.parametrize("architecture", ["phi3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_checkpoint_holds_each_head_once_and_loads_everywhere(ranks, tmp_path, architecture):
    results = ranks(
        "checkpoints:everywhere",
        4,
        architecture=architecture,
        shape=(2, 2),
        layouts=[(1, 4), (4, 1)],
        folder=str(tmp_path),
        num_key_value_heads=1,
    )
    assert [{road: wrong for road, wrong in result.items() if wrong and road != "fused"} for result in results] == [
        {}
    ] * 4


@pytest.mark.parametrize(("heads", "key_heads", "tp", "fits"), [(32, 4, 8, True), (12, 2, 4, True), (16, 3, 8, False)])
def test_number_of_ranks_must_be_a_multiple_of_the_heads(heads, key_heads, tp, fits):
    shape = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": 128,
        "vocab_size": 128,
    }
    plan = plan_for(tiny_on_meta("qwen3", **shape), tp=tp)
    assert (plan.problems == ()) == fits, plan.problems
    if not fits:
        assert any("3 key/value heads" in str(problem) for problem in plan.problems)
