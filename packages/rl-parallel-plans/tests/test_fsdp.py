"""FSDP2, alone and around tensor parallelism, against one process: gradients are sums, whatever the mesh."""

import pytest

TOLERANCE = 1e-5


def assert_equal_to_one_process(results):
    for result in results:
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        for found, truth in result["norms"]:
            assert found == pytest.approx(truth, rel=1e-5)


def test_gradients_are_sums_over_data_parallel_ranks(ranks):
    results = ranks("parallel_parity", 2, architecture="llama", shape=[2, 1], tied=True)
    assert_equal_to_one_process(results)
    assert all(result["tied"] and result["class"] == "FSDPLlamaForCausalLM" for result in results)


def test_optimizer_steps_on_two_by_two_ranks_equal_one_process(ranks):
    results = ranks(
        "parallel_parity", 4, architecture="qwen3", shape=[2, 2], tied=True, accumulate=2, optimizer_steps=2
    )
    assert_equal_to_one_process(results)
    for result in results:
        # AdamW divides by the root of what is nearly zero, so that rounding shows.
        assert max(result["weight_errors"].values()) < 1e-4
        assert result["tied"]
        assert result["kinds"] == ["('dp', 'tp')"]


def test_deferred_reduction_adds_up(ranks):
    results = ranks("parallel_parity", 4, architecture="qwen3", shape=[2, 2], accumulate=3, sync_last_only=True)
    assert_equal_to_one_process(results)


def test_one_rank_is_the_plain_model(ranks):
    (result,) = ranks("one_rank", 1)
    assert max(result["gradient_errors"].values()) == 0
    assert result["norms"][0] == result["norms"][1]


def test_gathered_parameters_take_the_asked_dtype_and_sharded_ones_keep_theirs(ranks):
    (result,) = ranks("one_rank", 1, param_dtype="bfloat16")
    assert 1e-4 < max(result["gradient_errors"].values()) < 0.1
    assert result["dtypes"] == ["torch.float32"]
