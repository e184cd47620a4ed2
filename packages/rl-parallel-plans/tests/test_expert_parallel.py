"""Experts shared out over ranks that have tokens of their own, against one process that has all tokens."""

import pytest
import transformers

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="experts are lists before transformers 5, and refused"
)
TOLERANCE = 1e-5


def assert_equal_to_one_process(results):
    for result in results:
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        found, truth = result["norms"]
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize(
    "architecture",
    ["gpt_oss", "deepseek_v3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_moe", "mixtral"))],
)
def test_two_ranks_of_experts_equal_one_process(ranks, architecture):
    assert_equal_to_one_process(ranks("expert_parallel:parity", 2, architecture=architecture, shape=[1, 2, 1]))


def test_rank_to_which_no_token_comes_takes_part(ranks):
    # One expert a token, and one token: one of the two ranks has nothing to do.
    results = ranks(
        "expert_parallel:parity", 2, architecture="mixtral", shape=[1, 2, 1], same_tokens=True, num_experts_per_tok=1
    )
    assert_equal_to_one_process(results)


@pytest.mark.parametrize("shape", [[2, 2, 1], [1, 2, 2]])
def test_experts_beside_data_and_tensor_parallel_ranks(ranks, shape):
    results = ranks("expert_parallel:parity", 4, architecture="gpt_oss", shape=shape, accumulate=2)
    assert_equal_to_one_process(results)


def test_experts_with_sequence_parallelism_and_recomputed_activations(ranks):
    results = ranks(
        "expert_parallel:parity",
        4,
        architecture="qwen3_moe",
        shape=[1, 2, 2],
        sequence_parallel=True,
        checkpointing=True,
    )
    assert_equal_to_one_process(results)


def test_plan_that_shares_out_experts_is_not_applied_without_doing_so(ranks):
    for message in ranks("expert_parallel:experts_left_whole", 2):
        assert "the experts are whole: call apply_expert_parallel first, or parallelize" in message


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("qwen3_moe", [1, 2, 1]), ("deepseek_v3", [1, 2, 2]), ("qwen3_moe", [1, 2, 2]), ("glm4_moe", [2, 2, 1])],
)
def test_experts_of_hugging_face_plans_are_shared_out(ranks, architecture, shape):
    number = shape[0] * shape[1] * shape[2]
    options = {"architecture": architecture, "shape": shape, "own_plan": True}
    assert_equal_to_one_process(ranks("expert_parallel:parity", number, **options))


@pytest.mark.parametrize("tp", [1, 2])
def test_copy_of_an_expert_parallel_model_is_one_by_itself(ranks, tp):
    for found in ranks("expert_parallel:copied_model", 2 * tp, tp=tp):
        assert found["loss_error"] < TOLERANCE
        assert max(found["gradient_errors"].values()) < TOLERANCE
        assert found["original_is_untouched"]
