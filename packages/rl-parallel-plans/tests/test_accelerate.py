"""Under accelerate: its FSDP2 around our tensor parallelism, or its loop around a model that it does not own."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")


def assert_equal_to_one_process(results):
    for result in results:
        assert max(result["errors"].values()) < 1e-5, result["errors"]
        for found, truth in result["norms"]:
            assert found == pytest.approx(truth, rel=1e-5)
        assert max(result["weights"].values()) < 1e-5
        assert result["names"] == []


@pytest.mark.parametrize(
    ("architecture", "tied", "activation_checkpointing"), [("qwen3", False, False), ("llama", True, True)]
)
def test_accelerates_fsdp_around_tensor_parallelism_equals_one_process(
    ranks, architecture, tied, activation_checkpointing
):
    results = ranks(
        "with_accelerate:accelerate_owns_fsdp",
        4,
        architecture=architecture,
        tied=tied,
        activation_checkpointing=activation_checkpointing,
    )
    assert_equal_to_one_process(results)
    assert all(result["tied"] == tied and result["class"].startswith("FSDP") for result in results)


def test_accelerates_loop_around_a_parallelized_model_equals_one_process(ranks):
    assert_equal_to_one_process(ranks("with_accelerate:accelerate_owns_the_loop", 4, architecture="qwen3"))


def test_accelerates_loader_gives_a_tensor_parallel_group_the_same_rows(ranks):
    rows = ranks("with_accelerate:rows_of_each_rank", 4)
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert sorted(row for batch in (*rows[0], *rows[2]) for row in batch) == [0, 1, 2, 3]
